"""Many texts in one pass: each is the one it would be alone, whoever joins, leaves or fails beside it."""

import gc
import weakref
from functools import partial

import pytest
import torch
from transformers import LlamaForCausalLM

from decoder import BatchError, Decoder, SamplingParams, TokenSwiftOptions, methods
from decoder.admission import Admission, CacheBytes
from decoder.arguments import check_arguments
from decoder.cache.draft_layer import DraftLayerCache
from decoder.cache.full import FullCache
from decoder.drafters import METHODS, Medusa, reads_text
from decoder.engine import Engine
from decoder.model.target import Target
from decoder.prefix_reuse import prefix_reuse
from decoder.request import GenerationRequest
from decoder.sequence import Sequence
from decoder.stats import Statistics

from .conftest import VOCAB, all_heads, clocked, finding, some, tiny_llama

LENGTHS = (1, 40, 7, 13, 33, 22, 5, 2)
NEW = (20, 14, 30, 26, 32, 38, 44, 0)


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def params(index):
    return SamplingParams(seed=index, min_p=0.05, repetition_penalty=1.1, penalty_window=20) if index % 4 else GREEDY


GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def alone(dec, texts):
    """Plain decoding of each text by itself."""
    asked = zip(texts, NEW, range(len(texts)), strict=True)
    return [dec.generate(text, new, "ar", params(index), return_logprobs=True) for text, new, index in asked]


def joined(dec, texts, method, **asked):
    return dec.generate_batch(texts, NEW, method, list(map(params, range(len(texts)))), **asked)


# What a step draws does not depend on how many texts wait: each of both with one of the other.
@pytest.mark.parametrize(
    ("max_batch", "whole_trees"),
    [
        pytest.param(3, False, id="three, visited nodes"),
        pytest.param(None, True, id="all, whole trees"),
        pytest.param(3, True, id="three, whole trees", marks=pytest.mark.slow),
        pytest.param(None, False, id="all, visited nodes", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("method", methods())
def test_each_text_of_a_batch_is_the_one_it_would_be_alone(
    dec, texts, alone, method, max_batch, whole_trees, monkeypatch
):
    monkeypatch.setattr(Target, "draws_whole_trees", whole_trees)
    outs = joined(dec, texts, method, max_batch=max_batch, return_logprobs=True)
    assert [out.token_ids for out in outs] == [out.token_ids for out in alone]
    assert [out.finish_reason for out in outs] == ["length"] * len(texts)
    for out, expected in zip(outs, alone, strict=True):
        assert out.logprobs == pytest.approx(expected.logprobs)


def test_a_step_is_one_pass_for_all_texts(dec, texts, monkeypatch):
    forward, passes = LlamaForCausalLM.forward, []

    def counted(model, *args, **kwargs):
        passes.append(kwargs["input_ids"].shape)
        return forward(model, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    dec.target.refresh_weights()  # which compares passes with such a forward
    passes.clear()
    dec.generate_batch(texts[:4], 20, "ar")
    # Nothing is padded: a token of each text that is not over yet.
    assert passes == [(1, 4)] * 20


def test_early_stops_and_late_arrivals_change_no_text(dec, texts, alone):
    stop = alone[4].token_ids[10]
    outs = joined(dec, texts, "tokenswift", stop=[stop], max_batch=2)
    for out, expected in zip(outs, alone, strict=True):
        tokens = expected.token_ids
        cut = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert out.token_ids == tokens[:cut]
        assert out.finish_reason == ("stop" if stop in tokens else "length")


def test_chunks_of_a_batch_are_its_texts_in_pieces(dec, texts, alone):
    pieces, order = {index: [] for index in range(len(texts))}, []
    for index, chunk in dec.stream_batch(texts, NEW, "medusa", list(map(params, range(len(texts)))), max_batch=3):
        pieces[index] += chunk.token_ids
        order.append(index)
        if chunk.output is not None:
            assert pieces[index] == chunk.output.token_ids == alone[index].token_ids
    # They come side by side, and a waiting one joins when another has left.
    assert len({*order[:6]}) == 3 and order[-1] >= 4


def test_a_cancelled_text_leaves_and_the_others_go_on(dec, texts, alone):
    engine = Engine(dec.target)
    asked = [
        check_arguments(dec, GenerationRequest(text, new, "tokenswift", params(index)))
        for index, (text, new) in enumerate(zip(texts, NEW, strict=True))
    ]
    running = [dec.sequence(engine, one) for one in asked]
    for sequence in running[:6]:
        engine.add(sequence)
    for _ in range(3):
        engine.step()
    engine.cancel(running[3])
    engine.add(running[6])
    engine.add(running[7])
    engine.cancel(running[7])
    while engine.running or engine.waiting:
        engine.step()
    done = [0, 1, 2, 4, 5, 6]
    assert [running[index].token_ids for index in done] == [alone[index].token_ids for index in done]
    assert len(running[3].token_ids) < NEW[3] and running[7].token_ids == []


@pytest.fixture
def small_chunks(monkeypatch):
    """Prompts in chunks of 4 tokens, two chunks in a step."""
    monkeypatch.setattr("decoder.model.target._PREFILL_CHUNK", 4)
    monkeypatch.setattr("decoder.scheduler._TOKENS", 8)


def added(dec, engine, index, texts, method="ar", **asked):
    one = check_arguments(dec, GenerationRequest(texts[index], NEW[index], method, params(index)))
    sequence = dec.sequence(engine, one)
    engine.add(sequence)
    return sequence


@pytest.mark.parametrize("method", ["ar", "tokenswift", "magicdec", "eagle3"])
def test_texts_get_tokens_while_a_long_prompt_joins(dec, texts, alone, method, small_chunks, monkeypatch):
    """Prompts of 7 tokens and of 40 and 33, of which one step takes 8: the last of each is left for the first tree."""
    clocked(monkeypatch, 0.05)  # to measure costs takes steps, too, and more of them where the machine is slow
    engine = Engine(dec.target)
    first = added(dec, engine, 2, texts, method)
    assert [one for one, tokens in engine.step() if tokens] == [first]
    long, longer = (added(dec, engine, index, texts, method) for index in (1, 4))
    steps = []
    while engine.running:
        steps.append({one for one, tokens in engine.step() if tokens})
    # 39 tokens are a chunk of 3 and nine of 4, the other's 32 are eight of 4 and go first but for each fourth chunk.
    assert [next(place for place, step in enumerate(steps) if one in step) for one in (long, longer)] == [8, 4]
    assert all(first in step for step in steps[:4])
    for sequence, index in ((first, 2), (long, 1), (longer, 4)):
        assert sequence.token_ids == alone[index].token_ids
        assert sequence.statistics.prefill_seconds > 0


def test_of_prompts_that_come_together_the_shortest_gets_its_tokens_first(dec, texts, alone, small_chunks):
    engine = Engine(dec.target)
    long, longer, short = (added(dec, engine, index, texts) for index in (1, 4, 2))
    assert [one for one, tokens in engine.step() if tokens] == [short]
    while engine.running:
        engine.step()
    for sequence, index in ((short, 2), (long, 1), (longer, 4)):
        assert sequence.token_ids == alone[index].token_ids


def test_a_long_prompt_does_not_wait_for_ever_while_short_ones_come(dec, texts, small_chunks):
    engine = Engine(dec.target)
    long = added(dec, engine, 1, texts)
    steps = 0
    while not long.token_ids and steps < 40:
        for _ in range(2):
            added(dec, engine, 2, texts)
        engine.step()
        steps += 1
    # Two short prompts are more than a step takes. Each of the ten chunks comes after three of theirs.
    assert steps <= 20


def test_a_text_that_is_cancelled_or_fails_while_its_prompt_joins_leaves_nothing(dec, texts, alone, small_chunks):
    class Failing:
        observed_queries, max_nodes = 0, 1

        def start(self, cache, queries):
            raise RuntimeError("my drafter cannot start")

    reuse = prefix_reuse(dec.target, 10**6)
    engine = Engine(dec.target, prefixes=reuse)
    first = added(dec, engine, 2, texts)
    engine.step()
    cancelled = added(dec, engine, 1, texts)
    engine.step()
    engine.cancel(cancelled)
    assert cancelled.cache.length > 0 and reuse.nbytes == 0
    failing = added(dec, engine, 4, texts)
    failing.drafter = Failing()
    while engine.running:
        stepped = dict(engine.step())
        if failing in stepped:
            assert stepped[failing] == [] and str(failing.error) == "my drafter cannot start"
    assert first.token_ids == alone[2].token_ids and failing.token_ids == cancelled.token_ids == []


def test_memory_that_runs_out_in_a_long_prompt_leaves_no_text_half_prefilled(
    dec, texts, alone, small_chunks, monkeypatch
):
    engine = Engine(dec.target)
    first = added(dec, engine, 2, texts)
    engine.step()
    long = added(dec, engine, 1, texts)
    engine.step()
    assert engine.decoding == 1 and len(engine.running) == 2
    with monkeypatch.context() as patch:
        patch.setattr(Target, "prefill", raising(RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 bytes.")))
        with pytest.raises(RuntimeError, match="allocate memory"):
            engine.step()
    assert engine.running == [first] and engine.decoding == 1
    while engine.running:
        engine.step()
    assert first.token_ids == alone[2].token_ids and long.token_ids == []


def raising(error):
    def fails(*args, **kwargs):
        raise error

    return fails


def test_a_text_that_fails_costs_the_others_nothing(dec, texts, alone):
    def failing(context, logits):
        if len(context) > LENGTHS[2] + 5:
            raise RuntimeError("the grammar has no rule for this")
        return logits

    hooks = [failing if index == 2 else None for index in range(len(texts))]
    with pytest.raises(BatchError, match=r"prompt 2: the grammar has no rule .*`outputs`") as caught:
        joined(dec, texts, "medusa", logits_hook=hooks)
    outputs = caught.value.outputs
    assert outputs[2] is None and isinstance(caught.value.errors[2], RuntimeError)
    assert [out.token_ids for index, out in enumerate(outputs) if index != 2] == [
        out.token_ids for index, out in enumerate(alone) if index != 2
    ]


@pytest.mark.parametrize("max_batch", [1, None])
def test_settings_that_do_not_fit_the_model_cost_the_others_nothing(dec, texts, max_batch):
    """As tokens to suppress that it does not have, which only the sampler finds."""
    samplings = [SamplingParams(seed=1), SamplingParams(suppress_tokens=(500,)), SamplingParams(seed=2)]
    with pytest.raises(BatchError, match="prompt 1: suppress_tokens has 500") as caught:
        dec.generate_batch(texts[:3], 8, "ar", samplings, max_batch=max_batch)
    assert [out and len(out.token_ids) for out in caught.value.outputs] == [8, None, 8]
    with pytest.raises(BatchError, match="prompt 0: suppress_tokens"):
        dec.generate_batch(texts[:1], 8, "ar", samplings[1], max_batch=max_batch)


def test_a_model_that_cannot_be_flattened_takes_a_pass_for_each_text(texts, alone, dec, monkeypatch):
    """As one that looks at keys on their way from the cache to attention."""
    from transformers.models.llama import modeling_llama

    attention = modeling_llama.LlamaAttention.forward

    def looking(module, *args, past_key_values=None, **kwargs):
        update = past_key_values.update

        class Looked:
            def update(self, *pair):
                key, value = update(*pair)
                return key + 0, value + 0

        return attention(module, *args, past_key_values=Looked(), **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", looking)
    other = Decoder(dec.model, heads=dict(dec.heads))
    assert dec.target.flattens and not other.target.flattens
    outs = joined(other, texts, "tokenswift")
    assert [out.token_ids for out in outs] == [out.token_ids for out in alone]


@pytest.mark.parametrize(
    "asked, words",
    [
        (dict(prompts=[]), "no prompts: give at least one"),
        (dict(prompts="a text"), "a list with a prompt per text"),
        (dict(prompts=[{"role": "user", "content": "hi"}]), "a list with a prompt per text"),
        (dict(prompts=[[1], []]), "prompt 1: the prompt is empty"),
        (dict(prompts=[[1], [2], [VOCAB]]), "prompt 2: token id 48 is outside"),
        (dict(max_new_tokens=[5, 5000]), "prompt 1: .* beyond the 4096 positions"),
        (dict(max_new_tokens=[5]), "max_new_tokens has 1 entries for 2 prompts .prompt 1 has none"),
        (dict(sampling=[GREEDY] * 3), "sampling has 3 entries for 2 prompts .there is no prompt 2"),
        (dict(logits_hook=[None, 3]), "prompt 1: logits_hook must be a function"),
        (dict(stop=[[1], [VOCAB]]), "prompt 1: stop token id 48"),
        (dict(stop=[None]), "stop has 1 entries for 2 prompts"),
        (dict(max_batch=0), "max_batch must be an integer of at least 1"),
    ],
    ids=str,
)
def test_bad_arguments_of_a_batch_name_the_prompt_before_any_work(dec, asked, words):
    with pytest.raises(ValueError, match=words):
        dec.stream_batch(**{"prompts": [[1, 2], [3]], "max_new_tokens": 5, **asked})


def test_stops_are_for_all_or_for_each(dec, texts, alone):
    first, second = alone[1].token_ids[4], alone[3].token_ids[6]
    sampling = [params(1), params(3)]
    for stop, ends in (([first, second], (first, second)), ([None, [second]], (None, second))):
        outs = dec.generate_batch([texts[1], texts[3]], [NEW[1], NEW[3]], "ar", sampling, stop=stop)
        wanted = [set(stop), set(stop)] if None not in stop else [set(), {second}]
        for out, expected, which in zip(outs, (alone[1], alone[3]), wanted, strict=True):
            tokens = expected.token_ids
            cut = next((place + 1 for place, token in enumerate(tokens) if token in which), len(tokens))
            assert out.token_ids == tokens[:cut], ends


def test_memory_bounds_how_many_run_together_and_tells_what_cannot_run_at_all(dec, texts, alone, monkeypatch):
    most = []
    step = Engine.step

    def watched(engine):
        stepped = step(engine)
        most.append(len(stepped))
        return stepped

    monkeypatch.setattr(Engine, "step", watched)
    largest = max(length + new for length, new in zip(LENGTHS, NEW, strict=True))
    room = dec.target.kv_bytes * 2 * (largest + 64) / 0.6
    monkeypatch.setattr("decoder.admission.available_memory", lambda device: room)
    outs = joined(dec, texts, "ar")
    assert [out.token_ids for out in outs] == [out.token_ids for out in alone]
    assert 1 < max(most) < 5
    monkeypatch.setattr("decoder.admission.available_memory", lambda device: room / 4)
    with pytest.raises(ValueError, match=r"prompt 0: its cache of [\d,]+ bytes does not fit the memory"):
        joined(dec, texts, "ar")


POSITIONS = 300


@pytest.fixture(scope="module")
def open_ended():
    """The decoder of a model with few positions.

    By the machine's clock trees may be so wide that caches outgrow the memory before three texts have made a step.
    """
    model = tiny_llama(max_position_embeddings=POSITIONS)
    small = tiny_llama(seed=2, num_hidden_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
    dec = Decoder(model, heads=all_heads(model), draft_model=small)
    dec.verify_costs._measure = finding([0.0, *(0.002 + 0.0001 * node for node in range(64))])
    return dec


@pytest.fixture
def preempted(monkeypatch):
    """The texts that were sent back to wait, and how many ran together in each step; caches grow by 16 positions."""
    found, preempt, step = ([], []), Sequence.preempt, Engine.step

    def noted(sequence):
        found[0].append(sequence)
        preempt(sequence)
        sequence.counted = sequence.statistics.cache_rebuilds

    def watched(engine):
        stepped = step(engine)
        found[1].append(len(stepped))
        return stepped

    monkeypatch.setattr(Sequence, "preempt", noted)
    monkeypatch.setattr(Engine, "step", watched)
    monkeypatch.setattr("decoder.cache.full._SMALLEST_GROWTH", 16)
    return found


def room_for(monkeypatch, dec, tokens, small_tokens=0, layers=0):
    """Memory for the caches of so many tokens, the draft cache of 64 of each text included; of the small model's; and
    for so many of the draft layer's, whose window makes them all alike."""
    room = dec.target.kv_bytes * tokens
    if layers:
        room += layers * DraftLayerCache.planned_bytes(dec.heads["eagle3"], POSITIONS)
    if small_tokens:
        room += dec.draft_target.kv_bytes * small_tokens
    room /= 0.6
    if dec.prefixes is not None:  # and for what is kept of ended texts
        room += dec.prefixes.max_bytes - dec.prefixes.nbytes
    monkeypatch.setattr("decoder.admission.available_memory", lambda device: room)


@pytest.fixture(scope="module")
def whole(open_ended, texts):
    """Plain decoding of three texts up to the model's last position."""
    return [open_ended.generate(text, None, "ar", params(index)).token_ids for index, text in enumerate(texts[1:4])]


# One method for each kind of cache or state that is read again.
@pytest.mark.parametrize(
    ("method", "whole_trees"),
    some(
        [(method, trees) for method in methods() for trees in (False, True)],
        [*((method, False) for method in ("ar", "tokenswift", "eagle3", "triforce")), ("auto", True), ("medusa", True)],
    ),
)
def test_texts_of_open_length_wait_again_where_they_outgrow_memory(
    open_ended, texts, whole, method, whole_trees, monkeypatch, preempted
):
    """There is room for two of the caches at their end; three begin together, and each text is as it is alone."""
    monkeypatch.setattr(Target, "draws_whole_trees", whole_trees)
    asked = texts[1:4]
    small = 2 * POSITIONS + 10 if reads_text(method) else 0
    layers = 3 if "eagle3" in METHODS[method].heads_kinds else 0
    room_for(monkeypatch, open_ended, 2 * (POSITIONS + 64) + 10, small, layers)
    outs = open_ended.generate_batch(asked, None, method, list(map(params, range(3))), return_logprobs=True)
    assert [out.token_ids for out in outs] == whole
    assert [len(out.logprobs) for out in outs] == [out.stats.generated for out in outs] == list(map(len, whole))
    assert max(preempted[1]) == 3
    # The last one waits, once: nobody goes back and forth.
    [waited] = preempted[0]
    assert waited.request.prompt_ids == asked[2]
    waited.drafter.finish(second := Statistics())
    assert outs[2].stats.cache_rebuilds == waited.counted + second.cache_rebuilds


def test_what_is_left_of_a_preempted_text_may_be_too_short_to_be_tuned(
    open_ended, texts, whole, monkeypatch, preempted
):
    monkeypatch.setattr("decoder.drafters.FEWEST_TUNED", POSITIONS - len(texts[3]) - 1)
    room_for(monkeypatch, open_ended, 2 * (POSITIONS + 64) + 10)
    outs = open_ended.generate_batch(texts[1:4], None, "tokenswift", list(map(params, range(3))))
    assert [out.token_ids for out in outs] == whole
    [waited] = preempted[0]
    assert type(waited.drafter).__name__ == "Autoregressive"
    assert outs[2].stats.drafted


@pytest.mark.parametrize(
    ("method", "share"),
    [*(("ar", share) for share in (1.2, 1.4, 1.6, 1.8, 2.0, 2.2)), ("medusa", 1.4), ("medusa", 2.0)],
)
def test_a_preempted_text_joins_again_only_where_it_can_stay(open_ended, texts, whole, method, share, preempted):
    """It needs no less than before, although its new cache is smaller, and its tokens are prefilled few times."""
    dec = open_ended
    admission = Admission(4, CacheBytes(int(dec.target.kv_bytes * (share * POSITIONS + 128) / 0.6) + 1))
    engine = dec.engine(admission)
    sequences = []
    for index in (1, 2):
        one = check_arguments(dec, GenerationRequest(texts[index], None, method, params(index - 1), ignore_eos=True))
        sequences.append(dec.sequence(engine, one))
        admission.plan(sequences[-1], partial(dec.cache_bytes, one))
        engine.add(sequences[-1])
    while engine.running or engine.waiting:
        engine.step()
    assert [sequence.token_ids for sequence in sequences] == whole[:2]
    assert len(preempted[0]) <= (share < 2)


def test_the_prompt_alone_tells_how_many_tokens_were_reused(open_ended, texts, monkeypatch, preempted):
    """What a preempted text has written itself is no part of it, though its prefix is kept like any other."""
    dec = Decoder(open_ended.model, prefix_cache_bytes=10**7)
    plain = [dec.generate(text, None, "ar", params(index)) for index, text in enumerate(texts[1:4])]
    room_for(monkeypatch, dec, 2 * (POSITIONS + 64) + 10)
    outs = dec.generate_batch(texts[1:4], None, "ar", list(map(params, range(3))))
    assert preempted[0] and [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert [out.stats.reused_tokens for out in outs] == [len(texts[1]) - 2, 0, 0]


def test_a_drafter_that_fails_when_it_is_preempted_fails_its_text_alone(open_ended, texts, whole, monkeypatch):
    class Failing(METHODS["ar"]):
        def finish(self, statistics):
            if self.context.max_new_tokens and len(self.context.prompt) == len(texts[3]):
                raise RuntimeError("the drafter's own fault")

        def __init__(self, context):
            super().__init__(context)
            self.context = context

    monkeypatch.setitem(METHODS, "failing", Failing)
    monkeypatch.setattr("decoder.cache.full._SMALLEST_GROWTH", 16)
    room_for(monkeypatch, open_ended, 2 * (POSITIONS + 64) + 10)
    with pytest.raises(BatchError, match="own fault") as caught:
        open_ended.generate_batch(texts[1:4], None, "failing", list(map(params, range(3))))
    assert [out and out.token_ids for out in caught.value.outputs] == [*whole[:2], None]


def test_a_text_of_open_length_that_outgrows_the_memory_alone_ends_there(
    open_ended, texts, whole, monkeypatch, preempted, caplog
):
    """Nothing that was generated is lost, of no text."""
    room_for(monkeypatch, open_ended, 150 + 64)
    outs = open_ended.generate_batch(texts[1:3], None, "ar", list(map(params, range(2))))
    for out, text, expected in zip(outs, texts[1:3], whole[:2], strict=True):
        assert out.finish_reason == "length"
        assert 75 < len(text) + len(out.token_ids) <= 150
        assert out.token_ids == expected[: len(out.token_ids)]
    assert caplog.text.count("outgrow the memory") == 2
    # What it needed beside others does not count.
    admission = Admission(1, CacheBytes(int(open_ended.target.kv_bytes * (POSITIONS + 128) / 0.6)))
    one = check_arguments(open_ended, GenerationRequest(texts[1], None, "ar", params(0), ignore_eos=True))
    engine = open_ended.engine(admission)
    engine.add(sequence := open_ended.sequence(engine, one))
    admission.plan(sequence, lambda sequence: CacheBytes(open_ended.target.kv_bytes * sequence.planned_positions))
    sequence.planned_positions = 10 * POSITIONS
    while not sequence.done:
        engine.step()
    assert sequence.token_ids == whole[0]


def test_a_text_of_open_length_that_fits_alone_runs_however_long_it_might_become(
    open_ended, texts, monkeypatch, preempted
):
    """What is planned is its next growth, and not the model's last position, which most texts never come to."""
    room_for(monkeypatch, open_ended, 3 * (40 + 64))
    stop = open_ended.generate(texts[2], 30, "ar", params(1)).token_ids[4]
    [out] = open_ended.generate_batch([texts[2]], None, "ar", params(1), stop=[stop])
    assert out.finish_reason == "stop" and len(out.token_ids) <= 5
    with pytest.raises(ValueError, match=r"prompt 0: its cache of [\d,]+ bytes does not fit the memory"):
        room_for(monkeypatch, open_ended, 30)
        open_ended.generate_batch([texts[2]], None, "ar", params(1), stop=[stop])


def test_a_preempted_text_can_be_cancelled_and_a_prompt_can_be_preempted(
    open_ended, texts, small_chunks, preempted, monkeypatch
):
    clocked(monkeypatch, 0.05)  # a text whose costs are being measured has no tokens yet
    dec, full = open_ended, [False]
    engine = Engine(dec.target, fits=lambda running, candidate: not (full[0] and running))
    sequences = []
    for index in (3, 5, 1):
        one = check_arguments(dec, GenerationRequest(texts[index], None, "tokenswift", params(index)))
        sequences.append(dec.sequence(engine, one))
        engine.add(sequences[-1])
    while not sequences[2].cache.length:
        engine.step()
    assert not sequences[2].token_ids and sequences[1].token_ids  # the last one's prompt is not whole yet
    full[0] = True
    engine.step()
    assert preempted[0] == [sequences[2], sequences[1]]
    assert engine.running == sequences[:1] and list(engine.waiting) == sequences[1:]
    assert engine.decoding == 1
    engine.cancel(sequences[2])
    while engine.running or engine.waiting:
        engine.step()
    for sequence, index in zip(sequences[:2], (3, 5), strict=True):
        assert sequence.token_ids == dec.generate(texts[index], None, "ar", params(index)).token_ids


def test_a_text_whose_drafts_decide_it_is_never_preempted(open_ended, texts, monkeypatch, preempted):
    """A new drafter would draft something else, and so choose another text; room is kept for all of it."""
    room_for(monkeypatch, open_ended, 2 * (POSITIONS + 64) + 10)
    options, samplings = TokenSwiftOptions(tree=(1, 1), verification="independent"), list(map(params, range(3)))
    outs = open_ended.generate_batch(texts[1:4], None, "medusa", samplings, options)
    assert max(preempted[1]) == 2 and not preempted[0]
    assert [len(out.token_ids) for out in outs] == [POSITIONS - len(text) for text in texts[1:4]]
    # Nor by an engine that plans otherwise.
    engine = Engine(open_ended.target, fits=lambda running, candidate: engine.decoding < 2)
    for text in texts[1:3]:
        one = check_arguments(open_ended, GenerationRequest(text, None, "medusa", GREEDY, options))
        engine.add(open_ended.sequence(engine, one))
    for _ in range(5):
        engine.step()
    assert engine.decoding == 2 and not preempted[0]


def test_what_is_planned_for_a_text_of_open_length_is_its_next_growth(open_ended, texts, monkeypatch):
    dec = open_ended
    monkeypatch.setattr("decoder.cache.full._SMALLEST_GROWTH", 16)
    one = check_arguments(dec, GenerationRequest(texts[1], None, "ar", GREEDY))
    # A partial cache of 64 pairs is planned for every method.
    assert dec.cache_bytes(one).device == dec.target.kv_bytes * (40 + 20 + 64)
    sequence = dec.sequence(engine := dec.engine(), one)
    capacity = sequence.cache.capacity
    assert dec.cache_bytes(one, sequence).device == dec.target.kv_bytes * (capacity + capacity // 2 + 64)
    engine.add(sequence)
    while sequence.cache.capacity == capacity:
        assert engine.step()
    assert sequence.cache.capacity == capacity + capacity // 2
    # Never more than the text may need.
    while not sequence.done:
        engine.step()
    assert dec.cache_bytes(one, sequence).device == dec.target.kv_bytes * (POSITIONS + 64)


@pytest.mark.parametrize("method", ["ar", "auto"])
def test_caches_go_with_the_engine_whose_texts_run(dec, texts, method):
    """At once, and not when Python collects cycles: whoever closes a batch may need the memory."""
    caches = weakref.WeakSet()
    engine = Engine(dec.target)
    for text in texts[1:4]:
        one = check_arguments(dec, GenerationRequest(text, 50, method, GREEDY, ignore_eos=True))
        engine.add(sequence := dec.sequence(engine, one))
        caches.add(sequence.cache)
    for _ in range(3):
        engine.step()
    gc.collect()
    gc.disable()
    try:
        assert len(caches) == 3
        del engine, sequence
        assert not len(caches)
    finally:
        gc.enable()


def test_texts_of_a_batch_share_the_model_with_single_ones(dec, texts, alone):
    """A stream that goes on between the steps of a batch disturbs neither."""
    single = dec.stream(texts[4], NEW[4], "tokenswift", params(4))
    tokens = []
    for _ in dec.stream_batch(texts[:3], NEW[:3], "medusa", list(map(params, range(3)))):
        chunk = next(single, None)
        tokens += chunk.token_ids if chunk is not None else []
    for chunk in single:
        tokens += chunk.token_ids
    assert tokens == alone[4].token_ids


def test_a_finished_text_gives_its_cache_back_while_others_run(dec):
    """Memory is planned for those that run together, so no more caches than that may be held."""
    prompts, held = [[index + 1, 2, 3] for index in range(8)], []
    for _, chunk in dec.stream_batch(prompts, 5, "ar", max_batch=2):
        if chunk.output is not None:
            gc.collect()
            held.append(sum(isinstance(each, FullCache) and len(each.keys) > 0 for each in gc.get_objects()))
    assert len(held) == 8 and max(held) <= held[0] + 1


def test_a_drafter_that_fails_ahead_of_its_step_ends_its_text_alone(dec, texts, alone, monkeypatch):
    class Failing(Medusa):
        made = 0

        def __init__(self, context):
            super().__init__(context)
            Failing.made += 1
            self.fails = Failing.made == 2

        def draft_ahead(self, verification, draws):
            if self.fails:
                raise ValueError("my drafter failed")
            return super().draft_ahead(verification, draws)

    monkeypatch.setattr(Target, "draws_whole_trees", True)
    monkeypatch.setitem(METHODS, "failing", Failing)
    with pytest.raises(BatchError) as failed:
        joined(dec, texts, "failing")
    assert [str(error) for error in failed.value.errors.values()] == ["my drafter failed"]
    assert list(failed.value.errors) == [1] and failed.value.outputs[1] is None
    others = [index for index in range(len(texts)) if index != 1]
    assert [failed.value.outputs[index].token_ids for index in others] == [alone[index].token_ids for index in others]


def test_memory_that_runs_out_is_no_single_texts_fault(dec, texts):
    def greedy_hook(context, logits):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")

    with pytest.raises(RuntimeError, match="allocate memory"):
        joined(dec, texts, "ar", logits_hook=[None, greedy_hook, *[None] * 6])
