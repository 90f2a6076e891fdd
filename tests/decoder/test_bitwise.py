"""Bit for bit: a token's logits depend on the tokens before it, and on nothing that shares its pass."""

import functools
import gc
import re
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from decoder import Decoder, SamplingParams, TokenSwiftOptions, methods
from decoder.backends import bitwise_check
from decoder.backends.native import library as native
from decoder.backends.native import native_attention, whole_model
from decoder.backends.native.native_layer import NativeLayer
from decoder.backends.native.whole_model import WholeModel
from decoder.cache.full import FullCache
from decoder.model import target

from .conftest import VOCAB, all_heads, random_tokens, tiny_llama, transformers_text
from .test_families import FAMILIES, ONCE_EACH, tiny

pytestmark = pytest.mark.usefixtures("with_native")

DTYPES = [torch.float32, torch.bfloat16]
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(seed=3, min_p=0.05, repetition_penalty=1.1, penalty_window=20),
    SamplingParams(temperature=0.7, seed=5),
]


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def exact(request):
    if not native.available():
        pytest.skip("there is no C compiler here")
    model = tiny_llama(request.param)
    small = tiny_llama(request.param, seed=2, num_hidden_layers=1, hidden_size=16, num_attention_heads=2)
    return Decoder(model, heads=all_heads(model), draft_model=small, bitwise=True)


@pytest.fixture(scope="module")
def prompt():
    return random_tokens(70, 4)


@pytest.fixture(scope="module")
def plain_of(exact, prompt):
    """Plain decoding with a sampling, once for all methods."""
    return functools.cache(
        lambda sampling: exact.generate(prompt, 30, "ar", sampling, return_logprobs=True, top_logprobs=5)
    )


@pytest.mark.parametrize("method", methods())
@pytest.mark.parametrize("sampling, tree", list(zip(SAMPLINGS, [(1,) * 4, (1, 2, 2), (3, 2)], strict=True)))
def test_every_method_gives_the_bits_of_plain_decoding(exact, prompt, plain_of, method, sampling, tree):
    plain = plain_of(sampling)
    options = TokenSwiftOptions(tree=tree, budget=40)
    out = exact.generate(prompt, 30, method, sampling, options, return_logprobs=True, top_logprobs=5)
    assert exact.bitwise
    assert (out.token_ids, out.logprobs) == (plain.token_ids, plain.logprobs)
    assert out.top_logprobs == plain.top_logprobs


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_chunks_of_the_prompt_make_no_difference(exact, prompt, chunk, monkeypatch):
    """Beside a prompt that is one chunk."""
    prompt = 8 * prompt + prompt[:30]
    monkeypatch.setattr(target, "_PREFILL_CHUNK", len(prompt))
    plain = exact.generate(prompt, 30, "ar", SAMPLINGS[1], return_logprobs=True)
    monkeypatch.setattr(target, "_PREFILL_CHUNK", chunk)
    again = exact.generate(prompt, 30, "suffix", SAMPLINGS[1], return_logprobs=True)
    assert (again.token_ids, again.logprobs) == (plain.token_ids, plain.logprobs)


@pytest.mark.parametrize("cut", [1, 7, 29])
def test_a_resumed_text_has_the_bits_of_the_uncut_one(exact, prompt, cut):
    plain = exact.generate(prompt, 30, "ar", SAMPLINGS[1], return_logprobs=True)
    rest = exact.generate(prompt + plain.token_ids[:cut], 30 - cut, "auto", SAMPLINGS[1], return_logprobs=True)
    assert (rest.token_ids, rest.logprobs) == (plain.token_ids[cut:], plain.logprobs[cut:])


def test_a_cache_that_grows_makes_no_difference(exact, prompt, monkeypatch):
    plain = exact.generate(prompt, 200, "ar", SAMPLINGS[1], return_logprobs=True)
    monkeypatch.setattr("decoder.cache.full._SMALLEST_GROWTH", 16)
    chunks, tokens = exact.stream(prompt, None, "suffix", SAMPLINGS[1]), []
    while len(tokens) < 200:
        tokens += next(chunks).token_ids
    chunks.close()
    assert tokens[:200] == plain.token_ids


def test_texts_decoded_together_have_the_bits_they_have_alone(exact, prompt):
    prompts = [prompt[:end] for end in (1, 70, 33, 12)]
    params = [SAMPLINGS[index % 3] for index in range(4)]
    alone = [
        exact.generate(*text, "ar", how, return_logprobs=True)
        for *text, how in zip(prompts, [40] * 4, params, strict=True)
    ]
    for method in ("ar", "suffix", "tokenswift-fused" if "gated" in exact.heads else "tokenswift"):
        outs = exact.generate_batch(prompts, 40, method, params, return_logprobs=True)
        assert [(out.token_ids, out.logprobs) for out in outs] == [(out.token_ids, out.logprobs) for out in alone]


@pytest.mark.parametrize("method", ["ar", "suffix"])
def test_texts_that_come_and_go_have_the_bits_they_have_alone(exact, method):
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCAB, (count,), generator=generator).tolist() for count in (3, 150, 61, 40, 90, 8, 220)]
    lengths = [40, 12, 60, 7, 33, 50, 20]
    params = [SamplingParams(seed=seed, temperature=0.8) for seed in range(7)]
    together = exact.generate_batch(prompts, lengths, method, params, return_logprobs=True, max_batch=4)
    for text, length, how, out in zip(prompts, lengths, params, together, strict=True):
        alone = exact.generate(text, length, "ar", how, return_logprobs=True)
        assert (out.token_ids, out.logprobs) == (alone.token_ids, alone.logprobs)


def test_caches_go_with_their_texts_and_not_when_memory_is_looked_through(exact, monkeypatch):
    """Nothing that a pass has prepared may refer to itself: long caches would wait for the collector."""
    living = []
    init = FullCache.__init__

    def noted(self, *arguments, **named):
        init(self, *arguments, **named)
        living.append(weakref.ref(self))

    monkeypatch.setattr(FullCache, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        exact.generate([1, 2, 3], 8, "ar")
        exact.generate_batch([[1, 2, 3], [4] * 90, [5, 6]], 8, "ar", max_batch=2)
        assert len(living) >= 4 and not any(cache() for cache in living)
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", ONCE_EACH)
def test_families_hold_it_or_say_why_not(name, dtype):
    model_type, overrides = FAMILIES[name]
    dec = Decoder(tiny(model_type, dtype, **overrides))
    if not dec.bitwise:
        assert "bit for bit" in dec.report() and "native" in dec.target.bitwise.reason
        with pytest.raises(ValueError, match="bitwise cannot be had here"):
            Decoder(dec.model, bitwise=True)
        return
    prompt = random_tokens(40, 1)
    plain = dec.generate(prompt, 16, "ar", SAMPLINGS[1], return_logprobs=True)
    for method in ("suffix", "magicdec"):
        out = dec.generate(prompt, 16, method, SAMPLINGS[1], TokenSwiftOptions(budget=24), return_logprobs=True)
        assert (out.token_ids, out.logprobs) == (plain.token_ids, plain.logprobs)


def leaning(function):
    """A function that adds a little to all rows but a lone one, as another order of sums would."""

    def row_dependent(x, *args, **kwargs):
        y = function(x, *args, **kwargs)
        return y if x.shape[-2] == 1 else y * (1 + 2**-8)

    return row_dependent


@pytest.mark.parametrize("part", ["norm", "activation", "rotary", "residual", "head", "attention", "layer", "pass"])
def test_an_operator_that_depends_on_its_rows_is_caught(part, monkeypatch):
    model = tiny_llama(torch.float32)
    layer = model.model.layers[1]
    if part in ("attention", "layer"):
        monkeypatch.setattr(WholeModel, "writes", lambda *given: False)
    if part == "norm":
        layer.input_layernorm.forward = leaning(layer.input_layernorm.forward)
    elif part == "activation":
        layer.mlp.act_fn = type("Leaning", (nn.Module,), {"forward": staticmethod(leaning(functional.silu))})()
    elif part == "rotary":
        rotary = model.model.rotary_emb
        turn = rotary.forward
        rotary.forward = lambda x, position_ids: tuple(
            one * (1 + 2**-8 * (position_ids.shape[1] > 1)) for one in turn(x, position_ids)
        )
    elif part == "residual":
        layer.register_forward_hook(lambda module, args, out: out * (1 + 2**-8 * (out.shape[1] > 1)))
    elif part == "head":
        model.lm_head.register_forward_hook(lambda module, args, out: out * (1 + 2**-8 * (out.shape[-2] > 1)))
    elif part == "attention":
        attend = native_attention.native_attention
        monkeypatch.setattr(
            whole_model,
            "native_attention",
            lambda heads, *given: attend(heads, *given) * (1 + 2**-8 * (len(heads) > 1)),
        )
    elif part == "layer":
        behind = NativeLayer.behind_attention
        monkeypatch.setattr(
            NativeLayer,
            "behind_attention",
            lambda self, attended, x: behind(self, attended, x) * (1 + 2**-16 * (x.shape[1] > 1)),
        )
    elif part == "pass":
        run = WholeModel._run_layers

        def leaning_pass(self, states, *given):
            run(self, states, *given)
            states.mul_(1 + 2**-16 * (states.shape[1] > 1))

        monkeypatch.setattr(WholeModel, "_run_layers", leaning_pass)
    dec = Decoder(model)
    assert not dec.bitwise and dec.target.bitwise.reason
    with pytest.raises(ValueError, match=r"bitwise cannot be had here: .*(row|token|text)"):
        Decoder(model, bitwise=True)


def test_layers_that_the_library_does_not_multiply_are_named(prompt):
    """Their bits may depend on the rows, whatever a test of some rows finds."""
    model = tiny_llama(torch.float32)
    layer = model.model.layers[1].mlp.down_proj
    forward = layer.forward
    layer.forward = lambda x: forward(x)
    dec = Decoder(model)
    words = r"the native library does not multiply model.layers.1.mlp.down_proj \(Linear\)"
    assert not dec.bitwise and re.fullmatch(words, dec.target.bitwise.reason)
    with pytest.raises(ValueError, match=f"bitwise cannot be had here: {words}; leave it at 'auto' or switch it off"):
        Decoder(model, bitwise=True)
    assert dec.generate(prompt, 10, "suffix").token_ids == dec.generate(prompt, 10, "ar").token_ids
    del layer.forward
    dec.generate(prompt, 3, "ar")
    assert dec.bitwise


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_library_it_is_off_and_says_so(without_native, dtype):
    dec = Decoder(tiny_llama(dtype))
    reason = "it needs the native library, off here: no C compiler (cc or gcc) is installed"
    assert not dec.bitwise and dec.target.bitwise.reason == reason and reason.split(": ")[1] in dec.report()
    with pytest.raises(ValueError, match=f"bitwise cannot be had here: {re.escape(reason)}; leave it at 'auto'"):
        Decoder(dec.model, bitwise=True)


def test_what_changes_after_loading_is_tested_again(prompt, monkeypatch):
    model = tiny_llama(torch.float32)
    auto, demanded = Decoder(model), Decoder(model, bitwise=True)
    assert auto.bitwise and demanded.bitwise
    with torch.autocast("cpu", torch.bfloat16):
        auto.generate(prompt, 3, "ar")
        assert not auto.bitwise and "autocast" in auto.report()
        with pytest.raises(ValueError, match="bitwise cannot be had here: autocast"):
            demanded.generate(prompt, 3, "ar")
    auto.generate(prompt, 3, "ar")
    assert auto.bitwise
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        auto.generate(prompt, 3, "ar")
        assert auto.bitwise
    finally:
        torch.set_num_threads(threads)
    hook = model.model.layers[0].register_forward_hook(
        lambda module, args, out: out * (1 + 2**-6 * torch.rand(()).item())
    )
    auto.generate(prompt, 3, "ar")
    assert not auto.bitwise
    hook.remove()
    auto.generate(prompt, 3, "ar")
    assert auto.bitwise
    tested = []
    test = bitwise_check.model_fault
    monkeypatch.setattr(bitwise_check, "model_fault", lambda target: (tested.append(target.dtype), test(target))[1])
    model.bfloat16()
    plain = auto.generate(prompt, 20, "ar", SAMPLINGS[0], return_logprobs=True)
    drafted = auto.generate(prompt, 20, "suffix", SAMPLINGS[0], return_logprobs=True)
    assert tested == [torch.bfloat16] and auto.bitwise
    assert (drafted.token_ids, drafted.logprobs) == (plain.token_ids, plain.logprobs)


@pytest.mark.parametrize("change", ["autocast", "threads"])
def test_what_changes_while_a_text_is_generated_is_told(prompt, change, caplog):
    auto, demanded = (Decoder(tiny_llama(torch.float32), bitwise=wanted) for wanted in ("auto", True))
    threads = torch.get_num_threads()
    streams = [dec.stream(prompt, 40, "suffix", ignore_eos=True) for dec in (auto, demanded)]
    for stream in streams:
        next(stream)
    try:
        if change == "threads":
            torch.set_num_threads(threads + 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
            assert sum(len(chunk.token_ids) for chunk in streams[0]) > 20
            assert not auto.bitwise and f"{change} changed while a text was generated" in auto.report()
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            with pytest.raises(ValueError, match=f"bitwise does not hold any more: .*{change} changed"):
                next(streams[1])
    finally:
        torch.set_num_threads(threads)
    for dec in (auto, demanded):
        dec.generate(prompt, 3, "ar")
        assert dec.bitwise


@pytest.mark.parametrize("change", ["class", "hook"])
def test_what_replaces_a_layer_from_outside_takes_effect(prompt, change, monkeypatch):
    """Another forward in the class, and a hook on all modules."""
    model = tiny_llama(torch.float32)
    dec, mlp = Decoder(model), type(model.model.layers[0].mlp)
    before = dec.generate(prompt, 20, "ar", SAMPLINGS[0]).token_ids
    if change == "class":
        monkeypatch.setattr(mlp, "forward", lambda self, x: self.down_proj(functional.relu(self.gate_proj(x))))
        handle = None
    else:

        def doubled(module, args, out):
            return 2 * out if isinstance(module, mlp) else None

        handle = nn.modules.module.register_module_forward_hook(doubled)
    try:
        expected = transformers_text(model, prompt, 20)
        drafted = dec.generate(prompt, 20, "suffix", SAMPLINGS[0]).token_ids
    finally:
        if handle is not None:
            handle.remove()
    assert drafted == expected != before


def test_a_head_without_weights_is_refused_in_a_sentence():
    model = torch.ao.quantization.quantize_dynamic(tiny_llama(torch.float32), {nn.Linear})
    with pytest.raises(ValueError, match=r"the language-model head .* quantise the other layers alone"):
        Decoder(model)


def test_weights_that_are_held_in_another_form_are_tested_again(prompt, monkeypatch):
    """The library holds weights that are bfloat16 numbers in another form than others."""
    model, tested = tiny_llama(torch.float32), []
    dec = Decoder(model)
    before, test = dec.target.backend.covers, bitwise_check.model_fault
    monkeypatch.setattr(bitwise_check, "model_fault", lambda target: (tested.append(1), test(target))[1])
    dec.generate(prompt, 3, "ar")
    assert not tested
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    plain = dec.generate(prompt, 30, "ar", SAMPLINGS[0], return_logprobs=True)
    assert tested and before != dec.target.backend.covers and dec.bitwise
    drafted = dec.generate(prompt, 30, "suffix", SAMPLINGS[0], return_logprobs=True)
    assert (drafted.token_ids, drafted.logprobs) == (plain.token_ids, plain.logprobs)


def test_float64_and_switching_off(prompt):
    dec = Decoder(tiny_llama())
    assert not dec.bitwise and "for float32 and bfloat16" in dec.target.bitwise.reason
    with pytest.raises(ValueError, match=r"bitwise cannot be had here: .* for float32 and bfloat16"):
        Decoder(tiny_llama(), bitwise=True)
    assert not Decoder(tiny_llama(torch.float32), bitwise=False).bitwise
    with pytest.raises(ValueError, match="bitwise must be True, False or 'auto', not 'yes'"):
        Decoder(tiny_llama(), bitwise="yes")
    with pytest.raises(ValueError, match="bitwise must be True, False or 'auto', not 1"):
        Decoder(tiny_llama(), bitwise=1)


def test_slots_nobody_wrote_to_are_finite(exact, prompt):
    """Uninitialised memory may hold anything, and zero times that is no number."""
    empty = torch.Tensor.new_empty

    def dirty(like, *sizes, **kwargs):
        made = empty(like, *sizes, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", dirty)
        out = exact.generate(prompt, 30, "suffix", SAMPLINGS[1], return_logprobs=True)
    plain = exact.generate(prompt, 30, "ar", SAMPLINGS[1], return_logprobs=True)
    assert (out.token_ids, out.logprobs) == (plain.token_ids, plain.logprobs)


def test_trees_are_no_deeper_than_tails_reach(exact):
    """A text that repeats itself would be drafted as deep as is asked for."""
    out = exact.generate(
        [1, 2, 3] * 60,
        100,
        "magicdec",
        SAMPLINGS[0],
        TokenSwiftOptions(tree=(1,) * 100, ngrams=0),
        return_logprobs=True,
    )
    plain = exact.generate([1, 2, 3] * 60, 100, "ar", SAMPLINGS[0], return_logprobs=True)
    assert (out.token_ids, out.logprobs) == (plain.token_ids, plain.logprobs)
