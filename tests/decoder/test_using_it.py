"""What users touch: arguments, streams, stops, and a model left as it was."""

import gc
import json
import logging
import math
import re
import shutil
import subprocess
import sys
import weakref

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import decoder
import decoder.__main__ as command
from decoder import Decoder, DraftHeads, SamplingParams, TokenSwiftOptions
from decoder.cache.full import FullCache
from decoder.drafters import METHODS
from decoder.drafters.tuning.verify_costs import VerifyCosts
from decoder.model.loading import read_model
from decoder.options import parse_tree
from decoder.text.stream import TextStream

from ..tiny import byte_tokenizer
from .conftest import VOCAB, all_heads, clocked, finding, random_heads, some, tiny_llama, transformers_text
from .test_families import EXPERTS, tiny


@pytest.fixture(scope="module")
def speaking():
    model = tiny_llama(vocab_size=256)
    return Decoder(model, byte_tokenizer(), all_heads(model), draft_model=tiny_llama(seed=1, vocab_size=256))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    model = tiny_llama(torch.float32, vocab_size=256)
    model.save_pretrained(root / "model")
    byte_tokenizer().save_pretrained(root / "model")
    random_heads(model).save_pretrained(root / "heads")
    (root / "prompt.txt").write_text("Call me Ishmael.", encoding="utf-8")
    return root


def test_a_stream_is_the_generation_in_pieces(speaking):
    sampling = SamplingParams(seed=3, repetition_penalty=1.1)
    whole = speaking.generate("Call me", 80, sampling=sampling)
    chunks = list(speaking.stream("Call me", 80, sampling=sampling))
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    assert "".join(c.text for c in chunks) == whole.text == chunks[-1].output.text
    assert all(c.output is None for c in chunks[:-1])
    assert whole.text == speaking.tokenizer.decode(whole.token_ids)
    assert whole.finish_reason == "length"


def test_a_program_finds_all_names_and_may_end_while_a_stream_is_open(folders):
    """No traceback then, although the interpreter closes the stream when PyTorch's modules are already gone."""
    program = f"""
import sys
import decoder
assert "torch" not in sys.modules
decoder.decoder, decoder.audit.__call__
from decoder import *
assert "audit" in dir(decoder) and constraints.choice and load is decoder.load and Decoder
dec = load({str(folders / "model")!r}, prefix_cache_bytes=10**6)
stream = dec.stream([1, 2, 3], 20)
next(stream)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_streamed_text_never_splits_a_character():
    tokenizer = byte_tokenizer()
    text = "déjà vu \u2014 na\u00efve \U0001f40b!"
    stream, pieces = TextStream(tokenizer), []
    ids = tokenizer(text)["input_ids"]
    for token in ids:
        stream.push(token)
        pieces.append(stream.take())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    unfinished = TextStream(tokenizer)
    unfinished.push(ids[1])
    assert unfinished.take() == ""
    assert unfinished.take(final=True) == "\ufffd"


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_across_chunks_are_never_shown_unless_they_are_included(include):
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer, stop=["END", "ENDS", "never", "ND"], include_stop=include)
    shown = ""
    for token in tokenizer("An EN and the END of it")["input_ids"]:
        stream.push(token)
        shown += stream.take()
        if stream.stopped:
            break
    assert shown == stream.text == "An EN and the " + include * "END"


# A text ends in the engine, which knows of a method that it gives one token or several in a step.
ENDING = some(decoder.methods(), ["ar", "tokenswift", "auto"])


@pytest.mark.parametrize("method", ENDING)
def test_stops_cut_where_ar_stops(speaking, method):
    free = speaking.generate("Call me", 60, "ar").token_ids
    token = free[20]
    first = free.index(token)
    out = speaking.generate("Call me", 60, method, stop=token)
    assert out.token_ids == free[: first + 1]
    assert out.finish_reason == "stop"


@pytest.mark.parametrize("method", ENDING)
def test_stop_strings_end_the_text_before_them(speaking, method):
    letters = torch.zeros(256, dtype=torch.bool)
    letters[speaking.tokenizer("abcdefgh")["input_ids"]] = True

    def hook(context, logits):
        return logits.masked_fill(~letters, -torch.inf)

    free = speaking.generate("Call me", 60, "ar", logits_hook=hook).text
    stop = free[30:33]
    included = speaking.generate(
        "Call me", 60, method, SamplingParams(include_stop_str_in_output=True), stop=stop, logits_hook=hook
    )
    assert included.text == free[: free.index(stop) + 3] and included.finish_reason == "stop"
    shown = [c.text for c in speaking.stream("Call me", 60, method, stop=[stop, "xyz"], logits_hook=hook)]
    assert "".join(shown) == free[: free.index(stop)]


def test_eos_of_the_generation_config_ends_unless_ignored(model, prompt):
    free = Decoder(model).generate(prompt, 50, "ar").token_ids
    try:
        model.generation_config.eos_token_id = [free[30]]
        ended = Decoder(model).generate(prompt, 50)
        assert ended.token_ids == free[: free.index(free[30]) + 1]
        assert ended.finish_reason == "stop"
        assert Decoder(model).generate(prompt, 50, ignore_eos=True).token_ids == free
    finally:
        model.generation_config.eos_token_id = None


def test_the_model_is_left_as_it_was(prompt):
    model = tiny_llama()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = Decoder(model, heads=random_heads(model)).stream(prompt, 30)
    for _ in range(3):
        next(stream)
        assert model.config._attn_implementation == "sdpa"
        assert model.training
        assert not model.model.norm._forward_pre_hooks
        assert all("forward" not in module.__dict__ for module in model.modules())
        assert model(torch.tensor([prompt])).logits.requires_grad
    stream.close()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_that_the_user_changes_between_two_generations_count(prompt):
    """In float32 a CPU runs on packed copies of the weights, and PyTorch does not notice a change of ``data``."""
    model = tiny_llama().float()
    dec = Decoder(model)
    dec.generate(prompt, 5)
    model.model.layers[0].mlp.down_proj.weight.data.mul_(-3)
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0)
    greedy = SamplingParams(temperature=0)
    changed = dec.generate(prompt, 30, "ar", sampling=greedy, ignore_eos=True).token_ids
    assert changed == Decoder(model).generate(prompt, 30, "ar", sampling=greedy, ignore_eos=True).token_ids
    assert changed == transformers_text(model, prompt, 30, eos_token_id=None)


def test_what_the_user_adds_to_the_model_is_borrowed_too(prompt):
    """A dropout put in after the decoder was made, in training mode: two greedy runs must agree."""
    model = tiny_llama()
    dec = Decoder(model)
    layer = model.model.layers[0].mlp
    layer.down_proj = torch.nn.Sequential(layer.down_proj, torch.nn.Dropout(0.5))
    model.train()
    runs = [dec.generate(prompt, 30, "ar", SamplingParams(temperature=0)).token_ids for _ in range(2)]
    assert runs[0] == runs[1]
    assert layer.down_proj[1].training
    model.resize_token_embeddings(VOCAB + 16)
    with pytest.raises(ValueError, match="vocabulary has changed"):
        dec.generate(prompt, 3)


def test_interleaved_generations_do_not_disturb_each_other(model, prompt):
    one, two = Decoder(model, heads=random_heads(model)), Decoder(model)
    expected = two.generate(prompt, 40, sampling=SamplingParams(seed=1)).token_ids
    streams = [d.stream(prompt, 40, sampling=SamplingParams(seed=1)) for d in (one, two, one)]
    texts = [[], [], []]
    while any(streams):
        for i, stream in enumerate(streams):
            chunk = next(stream, None) if stream else None
            if chunk is None:
                streams[i] = None
            else:
                texts[i] += chunk.token_ids
    assert texts == [expected] * 3


def test_logits_hook_and_logprobs_are_the_same_for_every_method(dec, prompt):
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    allowed[::3] = True

    def hook(context, logits):
        assert context[: len(prompt)] == prompt
        return logits.masked_fill(~allowed.roll(len(context)), -torch.inf)

    runs = [dec.generate(prompt, 40, m, logits_hook=hook, return_logprobs=True) for m in decoder.methods()]
    assert all(allowed.roll(len(prompt) + i)[t] for i, t in enumerate(runs[0].token_ids))
    for run in runs[1:]:
        assert run.token_ids == runs[0].token_ids
        torch.testing.assert_close(torch.tensor(run.logprobs), torch.tensor(runs[0].logprobs))


PAPER = TokenSwiftOptions(tree=(1, 3, 3, 3), ngrams=20)


@pytest.mark.parametrize("method", ["tokenswift", "auto"])
def test_statistics_add_up(dec, prompt, method, monkeypatch):
    # By the clock, `auto` may find that nothing is worth drafting, also in the texts of the tests before.
    clocked(monkeypatch, 0.01)
    dec = Decoder(dec.model, heads=random_heads(dec.model))
    out = dec.generate(prompt, 100, method, SamplingParams(seed=2), PAPER)
    stats = out.stats
    assert stats.generated == len(out.token_ids) == stats.accepted + stats.steps
    assert stats.accepted == sum(stats.accepted_by_depth)
    # The paper's tree is four deep, a chain behind a suffix up to 32.
    assert stats.drafted <= (4 if method == "tokenswift" else 32) * stats.steps
    assert stats.acceptance_rate == stats.accepted / stats.drafted
    assert 0 <= stats.ngram_acceptance_rate <= stats.acceptance_rate
    assert stats.tokens_per_step == 100 / stats.steps
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0


def test_a_repeating_text_is_drafted_by_ngrams(model):
    """Greedy decoding of a tiny model loops; the table must then reach as deep as any candidate."""
    dec = Decoder(model, heads=DraftHeads(model.config.hidden_size))
    out = dec.generate([1, 2, 3], 300, "tokenswift", SamplingParams(temperature=0), PAPER)
    assert out.stats.ngram_acceptance_rate > 0.5


@pytest.mark.parametrize("with_heads", [True, False])
def test_without_a_method_it_is_auto_unless_the_text_would_follow_the_clock(model, with_heads, monkeypatch):
    taken = []
    for name, drafter in METHODS.items():
        monkeypatch.setitem(METHODS, name, type(name, (drafter,), {"start": lambda self, *_: taken.append(self)}))
    dec = Decoder(model, heads=DraftHeads(model.config.hidden_size) if with_heads else None)
    next(dec.stream([1, 2, 3], 16))
    next(dec.stream([1, 2, 3], 16, options=TokenSwiftOptions(verification="independent")))
    names = [type(drafter).__name__ for drafter in taken]
    assert names == ["auto", "tokenswift" if with_heads else "prompt-lookup"]


def test_a_text_too_short_to_be_worth_tuning_is_decoded_plainly(model, prompt, monkeypatch):
    """To measure what trees cost would take longer; so no method that does is begun, in a batch beside long ones."""
    dec, measured = Decoder(model, heads=DraftHeads(model.config.hidden_size)), []
    monkeypatch.setattr(VerifyCosts, "begin", lambda costs, cache: measured.append(cache))
    monkeypatch.setattr(VerifyCosts, "_measure", finding([1.0] * 65))
    for method in ("auto", "suffix", "tokenswift", "medusa"):
        out = dec.generate(prompt, 15, method, SamplingParams(seed=2))
        assert (out.stats.steps, out.stats.drafted, out.stats.tokens_per_step) == (15, 0, 1.0)
        assert not measured
    dec.generate_batch([prompt, prompt], [15, 16], "auto")
    assert len(measured) == 1
    # A tree of the user's own is what the user gets.
    assert dec.generate(prompt, 15, "tokenswift", options=TokenSwiftOptions(tree=(1,), ngrams=0)).stats.drafted


def test_prompt_forms(speaking):
    ids = speaking.tokenizer("Call me")["input_ids"]
    expected = speaking.generate("Call me", 10).token_ids
    for prompt in (ids, torch.tensor(ids), torch.tensor([ids])):
        assert speaking.generate(prompt, 10).token_ids == expected
    assert speaking.generate("Call me", 0).token_ids == []


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(prompt=""), "empty"),
        (dict(prompt=[]), "empty"),
        (dict(prompt=[VOCAB * 100]), "outside the vocabulary"),
        (dict(prompt=[-1]), "outside the vocabulary"),
        (dict(prompt=torch.zeros(2, 3, dtype=torch.long)), "one prompt at a time"),
        (dict(prompt=torch.zeros(3)), "integer token ids"),
        (dict(prompt=["a"]), "integer token ids"),
        (dict(max_new_tokens=-1), "max_new_tokens"),
        (dict(max_new_tokens=5000), "4096 positions"),
        (dict(prompt=None), "a prompt is text"),
        (dict(prompt=b"abc"), "a prompt is text"),
        (dict(prompt=[True]), "a prompt is text"),
        (dict(sampling={"seed": 1}), "sampling must be a SamplingParams"),
        (dict(options={"tree": (1,)}), "options must be a TokenSwiftOptions"),
        (dict(method=["ar"]), "unknown method"),
        (dict(stop=1.5), "stop"),
        (dict(method="faster"), "unknown method 'faster'"),
        (dict(stop=""), "stop"),
        (dict(stop=b"abc"), "stop takes"),
        (dict(stop=bytearray(b"abc")), "stop takes"),
        (dict(stop=True), "stop takes"),
        (dict(stop=[3, False]), "stop takes"),
        (dict(stop=-5), "stop token id -5 is outside the vocabulary"),
        (dict(stop=[3, 99999]), "stop token id 99999 is outside the vocabulary"),
        (dict(max_new_tokens=True), "max_new_tokens"),
        (dict(ignore_eos="no"), "ignore_eos must be true or false"),
        (dict(return_logprobs=1), "return_logprobs must be true or false"),
        (dict(logits_hook=5), "logits_hook must be a function"),
        (dict(prompt=torch.tensor([True, False])), "integer token ids"),
        (dict(prompt=torch.zeros(3, dtype=torch.complex64)), "integer token ids"),
        (dict(prompt="a\ud800b"), "character 2 is the lone surrogate"),
    ],
)
def test_bad_arguments_are_told_at_once(speaking, arguments, words):
    with pytest.raises(ValueError, match=words):
        speaking.stream(**{"prompt": [1], "max_new_tokens": 5, **arguments})


def test_what_needs_a_tokenizer_or_heads_says_so(model):
    bare = Decoder(model)
    assert len(bare.generate([1], 3).token_ids) == 3
    for arguments, words in (
        (dict(prompt="text"), "tokenizer"),
        (dict(prompt=[1], stop="x"), "tokenizer"),
        (dict(prompt=[1], method="tokenswift"), "needs draft heads"),
        (dict(prompt=[1], method="medusa"), "needs draft heads"),
        (dict(prompt=[1], method="triforce"), "draft_model="),
        (dict(prompt=[1], method="draft-model"), "draft_model="),
    ):
        with pytest.raises(ValueError, match=words):
            bare.generate(max_new_tokens=3, **arguments)
    with pytest.raises(ValueError, match="64"):
        Decoder(model, heads=DraftHeads(64))
    for arguments, words in (
        (dict(tokenizer="x"), "tokenizer must be one of transformers, not str"),
        (dict(heads=torch.nn.Linear(2, 2)), "heads must be DraftHeads, .*, not Linear"),
        (dict(heads=[random_heads(model)]), "heads must be DraftHeads, .*, not list"),
        (dict(heads={"chained": 5}), "heads must be DraftHeads, .*, not int"),
    ):
        with pytest.raises(ValueError, match=words):
            Decoder(model, **arguments)
    with pytest.raises(ValueError, match="another vocabulary"):
        Decoder(model, draft_model=tiny_llama(vocab_size=VOCAB + 1))


@pytest.mark.parametrize(
    "field, value",
    [
        ("tree", ()),
        ("tree", 3),
        ("tree", (0,)),
        ("tree", (1, (0, 1))),
        ("tree", ((0, -1),)),
        ("tree", ((), (0,))),
        ("tree", "1,2"),
        ("ngram_delay", 1),
        ("draft_budget", 16),
        ("draft_cache", "x"),
        ("coupled", "no"),
        ("ngrams", -1),
        ("sink", -1),
        ("budget", 16),
        ("cache", "x"),
        ("verification", "x"),
    ],
)
def test_options_out_of_range_name_their_field(field, value):
    with pytest.raises(ValueError, match=field):
        TokenSwiftOptions(**{field: value})


def test_nan_logits_are_told_and_not_decoded(speaking):
    with pytest.raises(ValueError, match="logits hold NaN"):
        speaking.generate("Call me", 4, logits_hook=lambda context, logits: logits * float("nan"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["ar", "tokenswift"])
def test_a_hook_that_forbids_everything_or_returns_something_else_is_told(speaking, method, temperature):
    sampling = SamplingParams(temperature=temperature, min_p=0.1, top_p=0.9)
    for hook, words in (
        (lambda context, logits: logits - math.inf, "no token is left"),
        (lambda context, logits: logits[:5], r"shape it was given, \[256\]"),
        (lambda context, logits: None, "must return a tensor"),
    ):
        with pytest.raises(ValueError, match=words):
            speaking.generate("Call me", 4, method, sampling, logits_hook=hook)


def test_suppressed_tokens_outside_or_all_of_the_vocabulary_are_told_at_once(speaking):
    for banned, words in (([256], "256, which is outside"), (range(256), "the whole vocabulary")):
        with pytest.raises(ValueError, match=words):
            speaking.stream("Call me", 4, sampling=SamplingParams(suppress_tokens=banned))


@pytest.fixture(scope="module")
def to_the_end():
    """A decoder of a model of 50 positions, and its text from three tokens to the last of them."""
    model = tiny_llama(max_position_embeddings=50)
    dec = Decoder(model, heads=all_heads(model), draft_model=tiny_llama(seed=2, num_hidden_layers=1))
    return dec, dec.generate([1, 2, 3], 47, "ar").token_ids


@pytest.mark.parametrize("method", decoder.methods())
def test_without_a_length_the_text_goes_to_a_stop_or_the_models_last_position(to_the_end, method):
    dec, expected = to_the_end
    whole = dec.generate([1, 2, 3], None, method)
    assert whole.token_ids == expected
    assert whole.finish_reason == "length"
    token = whole.token_ids[25]
    assert (
        dec.generate([1, 2, 3], None, method, stop=token).token_ids
        == whole.token_ids[: whole.token_ids.index(token) + 1]
    )


def test_closing_a_stream_frees_its_caches(dec, prompt, monkeypatch):
    made = []

    class Watched(FullCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(weakref.ref(self))

    monkeypatch.setattr("decoder.cache.stored.FullCache", Watched)
    stream = dec.stream(prompt, 30)
    next(stream)
    gc.collect()
    assert made[0]() is not None
    stream.close()
    del stream
    gc.collect()
    assert made[0]() is None


def test_accepted_tokens_are_counted_by_who_proposed_them(dec, prompt):
    stats = dec.generate(prompt, 300, "tokenswift", options=TokenSwiftOptions(tree=(1, 1), ngrams=5)).stats
    sources = stats.accepted_by_source
    assert set(sources) == {"heads", "ngrams"}
    assert max(sources.values()) <= stats.accepted <= sum(sources.values())
    assert sources["heads"] > 0 < sources["ngrams"]
    lookup = dec.generate(prompt * 3, 100, "prompt-lookup", SamplingParams(temperature=0)).stats
    assert lookup.accepted > 0
    assert lookup.accepted_by_source == {"lookup": lookup.accepted}
    assert dec.generate(prompt, 20, "ar").stats.accepted_by_source == {}


def test_load_reads_folders(folders):
    dec = decoder.load(folders / "model", folders / "heads")
    assert dec.model.dtype == torch.float32
    assert dec.generate("Call me", 20, ignore_eos=True).stats.drafted > 0
    for arguments, error, words in (
        (dict(model=folders / "nothing"), OSError, "nothing"),
        (dict(model=folders / "model", heads=folders / "nothing"), OSError, "nothing"),
        (dict(model=folders / "model", device="tpu9"), ValueError, "tpu9"),
        (dict(model=folders / "model", dtype="int3"), ValueError, "int3"),
        (dict(model=folders / "model", dtype="float8_e4m3fn"), ValueError, "use one of auto, float32"),
        (dict(model=folders / "model", dtype=torch.int8), ValueError, "use one of auto, float32"),
        (dict(model=folders / "model", device=None), ValueError, "unknown device None"),
        (dict(model=None), ValueError, "the model must be a folder or a hub id, not NoneType"),
        (dict(model=5), ValueError, "the model must be a folder or a hub id, not int"),
        (dict(model=folders / "model", draft_model=5), ValueError, "the draft model must be a folder"),
        (dict(model=folders / "model", heads=5), ValueError, "heads must be DraftHeads"),
    ):
        with pytest.raises(error, match=words):
            decoder.load(**arguments)


def edited(folders, tmp_path, name, content):
    """A copy of the model's folder in which one file is replaced, or changed by a function of its bytes."""
    folder = tmp_path / "edited"
    shutil.copytree(folders / "model", folder)
    path = folder / name
    path.write_bytes(content(path.read_bytes()))
    return folder


def settings(**changes):
    return lambda content: json.dumps({**json.loads(content), **changes}).encode()


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("model.safetensors", lambda content: content[:-100], "the model .*edited cannot be read: "),
        ("model.safetensors", lambda content: b"", "the model .*edited cannot be read: "),
        ("config.json", lambda content: b"{", "the model .*edited cannot be read: "),
        ("config.json", settings(num_hidden_layers="x"), "the model .*edited cannot be read: .*num_hidden_layers"),
        ("config.json", settings(model_type="x"), "the model .*edited cannot be read: "),
        (
            "config.json",
            settings(hidden_act="x"),
            "edited cannot be used: llama has hidden_act='x', which is not known",
        ),
        (
            "config.json",
            settings(num_experts=8, num_local_experts=4),
            "edited cannot be used: llama has num_local_experts=4 and num_experts=8: give one",
        ),
        ("config.json", settings(num_hidden_layers=3), r"lacks tensors .*: model.layers.2.\S+ and 8 more"),
        ("config.json", settings(hidden_size=64), r"tensors of other shapes .*: lm_head.weight and 20 more"),
        ("tokenizer.json", lambda content: b"{}", "the tokenizer .*edited cannot be read: KeyError"),
        ("tokenizer.json", lambda content: b"", "the tokenizer .*edited cannot be read: "),
    ],
)
def test_a_spoilt_model_folder_is_one_sentence(folders, tmp_path, name, content, words):
    folder = edited(folders, tmp_path, name, content)
    with pytest.raises((ValueError, OSError), match=words) as told:
        decoder.load(folder)
    assert "\n" not in str(told.value)
    if name != "tokenizer.json":
        with pytest.raises((ValueError, OSError), match=words):
            decoder.load(folders / "model", draft_model=folder)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(hidden_act="x"), "llama has hidden_act='x', which is not known"),
        (dict(layer_types=["magic"] * 2), "llama has layer_types='magic', which is not known"),
        (
            dict(layer_types=["full_attention", "moe"]),
            r"llama .* do not look at layer_types=\['full_attention', 'moe'\]",
        ),
        (dict(layer_types=3), "llama has layer_types=3, which is no list"),
        (dict(mlp_layer_types=[0.5, 1]), r"llama has mlp_layer_types=\[0.5, 1\], which is no list"),
        (dict(num_experts=4.5, num_local_experts=4), "llama has num_local_experts=4 and num_experts=4.5: give one"),
        # Gemma 4 replaces its last layer by one that attends to everything.
        (dict(model_type="gemma4_text", layer_types=["full_attention", "magic"]), "has layer_types='magic'"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_an_unknown_option_is_told_before_weights_are_read(folders, tmp_path, changes, words):
    folder = edited(folders, tmp_path, "config.json", settings(**changes))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"edited cannot be used: .*{words}"):
        decoder.load(folder)


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            dict(num_hidden_layers=1),
            r"edited has tensors that its llama does not use: model\.layers\.1\.\S+ and 8 more",
        ),
        (dict(norm_type="x"), "edited says norm_type='x', which llama models do not look at"),
    ],
    ids=["tensors", "a choice"],
)
def test_what_a_model_does_not_look_at_is_told(folders, tmp_path, caplog, changes, words):
    decoder.load(edited(folders, tmp_path, "config.json", settings(**changes)))
    [told] = [record.getMessage() for record in caplog.records if record.name.startswith("decoder")]
    assert re.search(words, told)


def test_nothing_is_told_of_a_folder_that_is_as_it_should_be(folders):
    told, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("transformers").addHandler(handler)
    try:
        decoder.load(folders / "model")
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert not told


@pytest.mark.parametrize(
    "kind, lost, named", [("mixtral", "w1", "gate_up_proj"), ("qwen3_moe", "down_proj", "down_proj")]
)
def test_a_lost_tensor_of_one_expert_is_told_by_name(tmp_path, caplog, kind, lost, named):
    tiny(kind, torch.float32, **EXPERTS).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if f"experts.3.{lost}" not in name}
    save_file(kept, path, {"format": "pt"})
    with pytest.raises((ValueError, OSError), match=rf"mlp\.experts\.{named}") as told:
        read_model(tmp_path, torch.device("cpu"))
    assert "\n" not in str(told.value) and "LOAD REPORT" not in caplog.text


def test_tied_weights_are_not_missing(tmp_path):
    tied = tiny_llama(torch.float32, vocab_size=256, tie_word_embeddings=True)
    tied.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    dec = decoder.load(tmp_path, dtype="float32")
    assert dec.generate("Call me", 10).token_ids == Decoder(tied, byte_tokenizer()).generate("Call me", 10).token_ids


def test_a_mistyped_path_is_told_without_asking_the_hub(folders, monkeypatch):
    monkeypatch.chdir(folders.parent)

    def asked(*_, **__):
        pytest.fail("the hub was asked")

    for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"):
        monkeypatch.setattr(f"decoder.model.loading.{name}.from_pretrained", asked)
    monkeypatch.setattr("decoder.heads_files.fetch", asked)
    model = f"{folders.name}/model"
    for arguments, words in (
        (dict(model=f"{folders.name}/modle"), "there is no model folder at"),
        (dict(model=model, draft_model=f"{folders.name}/modle"), "there is no draft model folder at"),
        (dict(model=model, heads=f"{folders.name}/haeds"), "there is no folder of heads at"),
        (dict(model=model, heads={"chained": f"{folders.name}/haeds"}), "there is no folder of heads at"),
    ):
        with pytest.raises(OSError, match=words):
            decoder.load(**arguments)


def test_the_hubs_arguments_reach_all_that_is_read_and_the_revision_the_model_alone(folders, monkeypatch):
    asked = []

    def watch(owner, what, local):
        real = owner.from_pretrained

        def from_pretrained(source, **given):
            if str(source).startswith("someone/"):  # transformers' own calls are for what it was given
                asked.append((what, source, {name: given[name] for name in hub if name in given}))
            return real(folders / local, **{name: value for name, value in given.items() if name not in hub})

        monkeypatch.setattr(owner, "from_pretrained", from_pretrained)

    hub = dict(revision="v1", token="secret", cache_dir="/cache", local_files_only=True, trust_remote_code=False)
    watch(transformers.AutoConfig, "config", "model")
    watch(transformers.AutoTokenizer, "tokenizer", "model")
    watch(transformers.AutoModelForCausalLM, "model", "model")

    def fetch(repository, names, **given):
        asked.append(("heads", repository, given))
        return folders / "heads"

    monkeypatch.setattr("decoder.heads_files.fetch", fetch)
    decoder.load("someone/big", "someone/heads", draft_model="someone/small", **hub)
    unversioned = {name: value for name, value in hub.items() if name != "revision"}
    expected = [
        ("config", "someone/big", hub),
        ("model", "someone/big", hub),
        ("tokenizer", "someone/big", hub),
        ("config", "someone/small", unversioned),
        ("model", "someone/small", unversioned),
        ("tokenizer", "someone/small", unversioned),
        ("heads", "someone/heads", {name: hub[name] for name in ("token", "cache_dir", "local_files_only")}),
    ]
    assert all(one in expected for one in asked) and all(one in asked for one in expected)


def test_a_device_that_is_not_there_is_told(folders, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="no device 'cuda:99': the last one is 'cuda:1'"):
        decoder.load(folders / "model", device="cuda:99")


def test_the_command_drafts_with_a_small_model(folders, capsys):
    common = [
        "--model",
        folders / "model",
        "--prompt-file",
        folders / "prompt.txt",
        "--max-new-tokens",
        30,
        "--seed",
        5,
        "--suppress-tokens",
        "3,17",
    ]
    drafting = ["--draft-model", folders / "model", "--method", "triforce", "--tree", "0.0 1"]
    printed = []
    for method in (["--method", "ar"], drafting):
        assert command.main([str(argument) for argument in (*common, *method)]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


def test_a_tree_reads_as_it_is_written():
    assert parse_tree("1,3,3,3") == (1, 3, 3, 3)
    assert parse_tree("4") == (4,)
    assert parse_tree("0.0.0 0.1 1") == ((0, 0, 0), (0, 1), (1,))
    assert TokenSwiftOptions(tree=parse_tree("0.0.0 1")).depth == 3
    for text in ("x", "", "0.x 1", "1;2"):
        with pytest.raises(ValueError, match="written as branching"):
            parse_tree(text)


def test_a_field_that_no_request_has_is_named(dec, prompt):
    for call in (dec.generate, dec.stream, dec.generate_batch, dec.stream_batch):
        with pytest.raises(TypeError, match="temperature"):
            call([prompt], 3, temperature=0.5)
