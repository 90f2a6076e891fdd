"""`draft-model`: a small model drafts, with a cache of its own that follows the text, only as far as that pays."""

import time
from dataclasses import replace
from functools import partial
from itertools import product

import gguf
import pytest
import torch

import decoder
from decoder import Decoder, SamplingParams, TokenSwiftOptions
from decoder.arguments import check_arguments
from decoder.backends.native import library as native
from decoder.backends.native.quantised import QuantisedLinear
from decoder.drafters.model_levels import DraftModelLevels
from decoder.drafters.tuning.cost_tuned import CostTuned
from decoder.drafters.tuning.level_policy import LevelPolicy
from decoder.engine import Engine
from decoder.model.target import Target
from decoder.model.vocabularies import refuse_other_size, refuse_other_tokens
from decoder.prefill import prefill
from decoder.request import GenerationRequest
from decoder.sampling.native_choice import native_choice
from decoder.sampling.sampler import Sampler

from .conftest import VOCAB, clocked, random_heads, random_tokens, some, tiny_llama
from .test_gguf import hf_model, write_gguf  # noqa: F401 (a fixture)

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(seed=1),
    "window": SamplingParams(seed=3, top_p=0.9, min_p=0.02, repetition_penalty=1.5, penalty_window=7),
    "top-k": SamplingParams(seed=5, temperature=0.7, top_k=12),
}
TREES = {
    "tuned": None,
    "chain": (1, 1, 1, 1, 1),
    "tree": (2, 3, 2),
    "paths": ((0, 0, 0), (0, 1), (1,)),
}


def near(model, scale):
    """A draft model that is right often: the model itself with some noise in its weights."""
    small = tiny_llama(model.dtype)
    torch.manual_seed(11)
    for parameter, own in zip(small.parameters(), model.parameters(), strict=True):
        parameter.data = own.data + scale * own.data.std() * torch.randn_like(own)
    return small


@pytest.fixture(scope="module")
def pair(model):
    return Decoder(model, draft_model=near(model, 0.05))


@pytest.fixture(scope="module")
def plain(pair, prompt):
    return {name: pair.generate(prompt, 80, "ar", sampling).token_ids for name, sampling in SAMPLINGS.items()}


@pytest.mark.parametrize(
    "tree, coupled, name",
    some(
        product(TREES, [True, False], SAMPLINGS),
        [("tuned", True, name) for name in SAMPLINGS]
        + [(tree, True, "window") for tree in TREES]
        + [("tuned", False, "top-k"), ("tree", False, "window")],
    ),
)
def test_the_text_is_plain_decodings(pair, prompt, plain, monkeypatch, name, tree, coupled):
    clocked(monkeypatch, 0.01)
    options = TokenSwiftOptions(tree=TREES[tree], coupled=coupled)
    out = pair.generate(prompt, 80, "draft-model", SAMPLINGS[name], options)
    assert out.token_ids == plain[name]
    assert out.stats.accepted_by_source.keys() == {"draft model"}
    if coupled:
        assert out.stats.steps < 54


@pytest.mark.parametrize("scale", [0.0, 0.3])
def test_its_cache_is_that_of_a_model_which_has_read_the_text(model, prompt, monkeypatch, scale):
    """Behind every pass, whatever was drafted, accepted and taken back before."""
    dec = Decoder(model, draft_model=near(model, scale))
    clocked(monkeypatch, 0.01)
    seen, unread = [], DraftModelLevels._unread

    def checked(levels, text):
        tokens = unread(levels, text)
        cache = levels.cache
        assert cache.length + len(tokens) == len(text) and tokens
        if cache.length:
            logits = levels.small.model(torch.tensor([text[: cache.length]]), use_cache=True).past_key_values
            keys, values = cache.span(0, cache.length)
            for layer, own in enumerate(logits.layers):
                torch.testing.assert_close(keys[layer], own.keys)
                torch.testing.assert_close(values[layer], own.values)
        seen.append(len(tokens))
        return tokens

    monkeypatch.setattr(DraftModelLevels, "_unread", checked)
    out = dec.generate(prompt, 60, "draft-model", SamplingParams(seed=2))
    assert len(seen) > 5 and set(seen) >= ({1, 2} if scale else {2})
    if not scale:
        # The model itself, coupled, is always right.
        assert out.stats.accepted == out.stats.drafted


@pytest.mark.parametrize("method", ["draft-model", "auto"])
@pytest.mark.parametrize("heads", [False, True])
def test_texts_of_a_batch_draft_in_one_pass(model, prompt, monkeypatch, method, heads):
    dec = Decoder(model, heads=random_heads(model, kind="gated") if heads else None, draft_model=near(model, 0.05))
    clocked(monkeypatch, 0.01)
    monkeypatch.setattr("decoder.drafters.tuning.cost_tuned._TURN", 4)
    passes, forward = [], dec.draft_target.forward
    monkeypatch.setattr(
        dec.draft_target, "forward", lambda trees, caches: passes.append(len(trees)) or forward(trees, caches)
    )
    prompts = [prompt[:n] for n in (40, 7, 1, 25)]
    samplings = list(SAMPLINGS.values())
    together = dec.generate_batch(prompts, 60, method, samplings)
    assert max(passes) > 1
    for alone, sampling, out in zip(prompts, samplings, together, strict=True):
        assert out.token_ids == dec.generate(alone, 60, "ar", sampling).token_ids
    for name in ("draft-model", "auto"):
        streamed = [token for chunk in dec.stream(prompt, 40, name, samplings[1]) for token in chunk.token_ids]
        assert streamed == dec.generate(prompt, 40, "ar", samplings[1]).token_ids


def test_a_text_that_waited_goes_on(model, prompt):
    """Preempted in the middle: the new drafter reads all of the text again."""
    dec = Decoder(model, draft_model=near(model, 0.05))
    sampling = SamplingParams(seed=4)
    expected = dec.generate(prompt, 80, "ar", sampling).token_ids
    given = (prompt, 80, "draft-model", sampling, TokenSwiftOptions(tree=(2, 2)), None, True, False, None)
    engine = Engine(dec.target)
    sequence = dec.sequence(engine, check_arguments(dec, GenerationRequest(*given)))
    engine.add(sequence)
    for _ in range(10):
        engine.step()
    engine.running.clear()
    sequence.preempt()
    engine.add(sequence)
    while not sequence.done:
        engine.step()
    assert sequence.token_ids == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["draft-model", "auto"])
def test_bit_for_bit(prompt, dtype, method):
    if not native.multiplies(dtype):
        pytest.skip("no products here whose rows do not depend on their number")
    model = tiny_llama(dtype)
    dec = Decoder(model, draft_model=near(model, 0.05), bitwise=True)
    for sampling in SAMPLINGS.values():
        expected = dec.generate(prompt, 100, "ar", sampling, return_logprobs=True)
        for tree in TREES.values() if method == "draft-model" else (None,):
            options = TokenSwiftOptions(tree=tree)
            out = dec.generate(prompt, 100, method, sampling, options, return_logprobs=True)
            assert out.token_ids == expected.token_ids and out.logprobs == expected.logprobs


def test_the_prompt_is_read_in_parts_that_others_can_run_between(model, monkeypatch):
    dec = Decoder(model, draft_model=near(model, 0.05), prefix_cache_bytes=1 << 24)
    monkeypatch.setattr("decoder.model.target._PREFILL_CHUNK", 64)
    prompt = random_tokens(300, 3)
    reads, read = [], DraftModelLevels.read_prompt
    monkeypatch.setattr(DraftModelLevels, "read_prompt", lambda levels, end: reads.append(end) or read(levels, end))
    expected = dec.generate(prompt, 30, "ar").token_ids
    assert dec.generate([*prompt, *expected[:4]], 20, "draft-model").token_ids == expected[4:24]
    # The target has taken over the beginning, which the draft model reads in parts all the same.
    assert reads[-1] == 303 and max(b - a for a, b in zip([0, *reads], reads, strict=False)) <= 64


def test_where_its_passes_take_too_long_it_stops_drafting(pair, prompt, monkeypatch):
    """By the clock: passes of the draft model that take as long as the target's, and are seldom right."""
    dec = Decoder(pair.model, draft_model=tiny_llama(seed=9))
    clocked(monkeypatch, 0.1)
    monkeypatch.setattr(LevelPolicy, "overhead", lambda policy, levels: 0.9 * levels)
    levels, propose = [], CostTuned.propose
    monkeypatch.setattr(
        CostTuned, "propose", lambda own, *given: levels.append(len(own._ahead or ())) or propose(own, *given)
    )
    out = dec.generate(prompt, 300, "draft-model", SamplingParams(seed=2))
    assert out.token_ids == dec.generate(prompt, 300, "ar", SamplingParams(seed=2)).token_ids
    late = levels[len(levels) // 2 :]
    assert sum(late) < 0.3 * len(late)


def test_a_chain_that_is_unlikely_to_be_right_goes_on_no_further(pair, prompt, monkeypatch):
    clocked(monkeypatch, 0.01)
    depths = {}
    for seconds in (0.0, 0.8):
        monkeypatch.setattr(
            "decoder.drafters.tuning.cost_tuned.CostTuned._take_levels",
            lambda own, levels, _, seconds=seconds: (
                setattr(own, "_ahead", levels),
                own._pass_seconds.observe(seconds),
                depths.setdefault(seconds, []).append((len(levels), own._asked)),
            ),
        )
        dec = Decoder(pair.model, draft_model=near(pair.model, 0.2))
        dec.generate(prompt, 200, "draft-model", SamplingParams(seed=2))
    free, dear = (sum(n for n, _ in of) / len(of) for of in depths.values())
    assert dear < 0.7 * free
    assert any(count < asked for count, asked in depths[0.8])


def test_auto_takes_the_one_of_heads_and_draft_model_that_pays(model, prompt, monkeypatch):
    clocked(monkeypatch, 0.01)
    monkeypatch.setattr("decoder.drafters.tuning.cost_tuned._TURN", 16)
    sources, propose = [], CostTuned.propose
    monkeypatch.setattr(
        CostTuned, "propose", lambda own, *given: sources.append(own._source.source) or propose(own, *given)
    )
    for scale, better in ((0.0, "draft model"), (3.0, "heads")):
        dec = Decoder(model, heads=random_heads(model, kind="gated"), draft_model=near(model, scale))
        monkeypatch.setattr(LevelPolicy, "rate", lambda policy, levels: policy.tokens(0, levels) / (1 + 0.2 * levels))
        expected = dec.generate(prompt, 400, "ar", SamplingParams(seed=2)).token_ids
        sources.clear()
        assert dec.generate(prompt, 400, "auto", SamplingParams(seed=2)).token_ids == expected
        assert sources[0] == "heads" and set(sources) == {"heads", "draft model"}
        if better == "draft model":
            assert sources.count(better) > 0.5 * len(sources)


def test_without_enough_positions_the_text_goes_on_plainly(model, prompt):
    small = tiny_llama(max_position_embeddings=60)
    dec = Decoder(model, draft_model=small)
    expected = dec.generate(prompt, 60, "ar").token_ids
    for tree in (None, (1, 1, 1)):
        out = dec.generate(prompt, 60, "draft-model", options=TokenSwiftOptions(tree=tree))
        assert out.token_ids == expected
    assert out.stats.accepted
    with pytest.raises(ValueError, match="has 60 positions, too few for the 80 tokens of the prompt"):
        dec.generate(prompt * 2, 20, "draft-model")
    assert dec.generate(prompt * 2, 20, "auto").token_ids == dec.generate(prompt * 2, 20, "ar").token_ids


class Tokens(dict):
    """What stands for a tokenizer here."""

    def get_vocab(self):
        return self


@pytest.mark.parametrize("rows", [VOCAB - 5, VOCAB + 9])
def test_padding_of_another_size_is_no_other_vocabulary(model, prompt, rows, monkeypatch):
    monkeypatch.setattr("decoder.decoder.refuse_other_size", lambda *given: None)
    dec = Decoder(model, draft_model=tiny_llama(vocab_size=rows))
    for sampling in SAMPLINGS.values():
        for tree in (None, (2, 2)):
            plain = dec.generate(prompt, 40, "ar", replace(sampling, seed=8))
            for method in ("draft-model", "triforce"):
                out = dec.generate(prompt, 40, method, replace(sampling, seed=8), TokenSwiftOptions(tree=tree))
                assert out.token_ids == plain.token_ids


def test_another_vocabulary_is_refused():
    tokens = Tokens({f"t{place}": place for place in range(100)})
    refuse_other_size(100, 100, None)
    refuse_other_size(128, 120, tokens)
    for sizes, tokenizer in (((128, 120), None), ((128, 90), tokens), ((32000, 100), tokens)):
        with pytest.raises(ValueError, match="the draft model has another vocabulary"):
            refuse_other_size(*sizes, tokenizer)
    refuse_other_tokens(tokens, Tokens({f"t{place}": place for place in range(90)} | {"[PAD95]": 95}))
    with pytest.raises(ValueError, match=r"token 7 is 'x', the model's 't7'; give one of the same tokens"):
        refuse_other_tokens(tokens, Tokens({"x": 7, "t8": 8}))


def test_the_prefill_stops_between_parts(pair, prompt, monkeypatch):
    """A generator that is asked to go on, of which each part is a chunk of both models."""
    monkeypatch.setattr("decoder.model.target._PREFILL_CHUNK", 16)
    given = (prompt, 20, "draft-model", SamplingParams(), TokenSwiftOptions(), None, True, False, None)
    engine = Engine(pair.target)
    sequence = pair.sequence(engine, check_arguments(pair, GenerationRequest(*given)))
    with torch.inference_mode(), pair.target.patched():
        lengths = []
        for _ in prefill(pair.target, sequence, None):
            lengths.append((sequence.cache.length, sequence.drafter._draft_model.cache.length))
    assert lengths[:3] == [(7, 7), (23, 23), (39, 39)] and all(own == drafts for own, drafts in lengths)
    assert sequence.drafter._draft_model.cache.length == 39


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_library_ranks_as_the_sampler_does(with_native, dtype):
    generator = torch.Generator().manual_seed(0)
    for sampling in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.7, seed=3),
        SAMPLINGS["plain"],
        SamplingParams(seed=4, min_p=0.05, repetition_penalty=1.3, penalty_window=9),
    ):
        sampler = Sampler(
            sampling,
            1003,
            torch.device("cpu"),
            list(range(40)),
            choice=partial(native_choice, device=torch.device("cpu")),
        )
        plainly = Sampler(sampling, 1003, torch.device("cpu"), list(range(40)))
        assert sampler.native is not None
        for pushed in range(4):
            contexts = (
                sampler.draft_context(list(range(60, 60 + pushed))),
                plainly.draft_context(list(range(60, 60 + pushed))),
            )
            logits = (3 * torch.randn(1003, generator=generator)).to(dtype)
            for coupled in (True, False):
                found, expected = (
                    one.best_drafts(logits, coupled, context, 6)
                    for one, context in zip((sampler, plainly), contexts, strict=True)
                )
                # Below the best one equal or nearly equal candidates may change places.
                assert found[0][0] == expected[0][0]
                for (_, own), (_, score) in zip(found, expected, strict=True):
                    if score == -torch.inf:
                        assert own == -torch.inf
                    else:
                        assert found[0][1] - own == pytest.approx(expected[0][1] - score, abs=1e-3)


def test_one_of_a_gguf_file_keeps_the_files_formats(with_native, hf_model, tmp_path):  # noqa: F811
    """Unpacked to float32 a pass would read eight times as much, and drafting would not pay."""
    for name in ("target", "draft"):
        write_gguf(tmp_path / f"{name}.gguf", hf_model, gguf.GGMLQuantizationType.Q8_0)
    dec = decoder.load(tmp_path / "target.gguf", draft_model=tmp_path / "draft.gguf")
    for target in (dec.target, dec.draft_model):
        assert any(isinstance(module, QuantisedLinear) for module in target.model.modules())
    wide = decoder.load(tmp_path / "target.gguf", draft_model=tmp_path / "draft.gguf", dtype="float32")
    assert not any(isinstance(module, QuantisedLinear) for module in wide.draft_model.model.modules())
    prompt = list(range(5, 40))
    texts = [
        dec.generate(prompt, 30, method, SamplingParams(seed=3), ignore_eos=True).token_ids
        for method in ("ar", "draft-model")
    ]
    assert texts[0] == texts[1]


def test_catching_up_with_a_text_that_went_on_plainly_is_no_cost_of_drafting(pair, prompt, monkeypatch):
    """A step that tries drafts reads what steps without have left unread, which steps that draft do not have to."""
    told, observe, prefilled = [], LevelPolicy.observe, []
    monkeypatch.setattr(
        LevelPolicy, "observe", lambda policy, *given: (told.append(given[2:]), observe(policy, *given))[1]
    )
    prefill_of = Target.prefill

    def slow(target, tokens, cache, *others):
        if target.model is pair.draft_model:
            prefilled.append(len(tokens))
            time.sleep(0.2)
        return prefill_of(target, tokens, cache, *others)

    monkeypatch.setattr(Target, "prefill", slow)
    levels = DraftModelLevels.state_behind
    calls = iter(range(10**6))
    # Only each twentieth step may draft.
    monkeypatch.setattr(
        DraftModelLevels,
        "state_behind",
        lambda own, cache, sampler: None if next(calls) % 20 else levels(own, cache, sampler),
    )
    pair.generate(prompt, 60, "draft-model", SamplingParams(seed=3), ignore_eos=True)
    assert max(prefilled) > 16 and told and all(drafting + rest < 0.15 for drafting, rest in told)
