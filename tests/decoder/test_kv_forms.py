"""Caches that are quantised or in host memory: the text of `ar` with the same cache, whatever drafts."""

import functools
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from decoder import Decoder, SamplingParams, TokenSwiftOptions, load, methods, new_sequence
from decoder.admission import CacheBytes
from decoder.backends.base import AttentionShape
from decoder.backends.native import library as native
from decoder.backends.native.whole_model import WholeModel
from decoder.cache import stored
from decoder.cache.form import CacheForm
from decoder.cache.full import FullCache
from decoder.cache.layout import Layout
from decoder.cache.partial import PartialCache
from decoder.cache.rounding import rounding_cache
from decoder.cache.stored import StoredCache, full_cache
from decoder.cache.streaming import RecentCache
from decoder.engine import Engine
from decoder.model import target as target_module
from decoder.prefix_reuse import prefix_reuse

from .conftest import all_heads, random_heads, random_tokens, some, tiny_llama, transformers_text
from .test_whole_model import some_tree

FORMS = [CacheForm("int8"), CacheForm("fp8"), CacheForm(None, True), CacheForm("int8", True)]
SAMPLING = SamplingParams(seed=3, min_p=0.05, repetition_penalty=1.1, penalty_window=20)
LARGEST = {"int8": 127.0, "fp8": 448.0}


def options(form, **others):
    return TokenSwiftOptions(**{"tree": (2, 2, 1), "ngrams": 3, "budget": 24} | others, **vars(form))


@pytest.fixture(params=FORMS, ids=str)
def form(request):
    return request.param


# What is kept.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_dtype", LARGEST)
def test_a_vector_is_rounded_by_itself_to_codes_and_one_scale(kv_dtype, dtype):
    form, kept = CacheForm(kv_dtype), torch.bfloat16 if dtype == torch.float16 else dtype
    states = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    states[0, 0, 0] = 0
    states[0, 0, 1] *= 1e-3
    states[0, 0, 2, 3] = 50
    rounded = form.rounded(states)
    for place in [(0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 2, 4)]:
        vector = states[place]
        assert torch.equal(form.rounded(vector[None])[0], rounded[place])
        # The slow version, number by number.
        largest = vector.abs().max().item()
        scale = torch.tensor(largest / LARGEST[kv_dtype], dtype=torch.float64).to(kept).item()
        for number, found in zip(vector.tolist(), rounded[place].tolist(), strict=True):
            quotient = number / scale if scale else 0.0
            code = round(quotient) if kv_dtype == "int8" else torch.tensor(quotient).to(torch.float8_e4m3fn).item()
            expected = max(-LARGEST[kv_dtype], min(code, LARGEST[kv_dtype])) * scale
            assert found == torch.tensor(expected, dtype=torch.float64).to(dtype).item()
            # A scale in half precision is rounded, and so is the product; the numbers of float16 end at 6e-8.
            assert abs(found - number) <= (form.error + 2 * torch.finfo(kept).eps) * largest + 6e-8
    assert not rounded[0, 0, 0].any()


@pytest.mark.parametrize("kv_dtype", [None, *LARGEST])
def test_the_largest_error_is_told_and_not_twice_as_much(kv_dtype):
    form, states = CacheForm(kv_dtype), torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    found = (form.rounded(states) - states).abs().max().item()
    assert form.error / 2 < found <= form.error if kv_dtype else found == form.error == 0


@pytest.mark.parametrize("kv_dtype", LARGEST)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_stays_visible(kv_dtype, wrong):
    states = torch.ones(1, 4)
    states[0, 2] = wrong
    assert not CacheForm(kv_dtype).rounded(states).isfinite().all()


def test_bytes_are_those_planned(form):
    model = tiny_llama(torch.float32)
    dec = Decoder(model, bitwise=False)
    cache = full_cache(form, 200)
    with torch.inference_mode(), dec.target.patched():
        dec.target.prefill(list(range(30)), cache)
    shape, layers = dec.target.attention_shape, dec.target.layers
    vector = 8 * 4 if form.kv_dtype is None else 8 + 4
    assert form.token_bytes(shape, layers) == layers * 2 * 2 * vector
    working = 2 * 2 * 8 * 4 * 200
    assert cache.nbytes == layers * 2 * 2 * vector * 200 + working
    assert cache.nbytes == form.device_bytes(shape, layers, torch.device("cpu"), 200)
    # On another device, an offloaded cache takes no more there than the layers that passes look at.
    on_device = form.device_bytes(shape, layers, torch.device("cuda"), 200)
    arriving = 2 * 2 * 2 * vector * 200 if form.kv_dtype else 0
    assert on_device == (2 * working + arriving if form.offload else cache.nbytes)
    assert type(on_device) is int
    assert cache.device_bytes == (working if form.offload else cache.nbytes)
    # Pinned memory comes in powers of two; a CPU's own memory has been counted.
    pinned = sum(2 ** math.ceil(math.log2(part.nbytes)) for part in cache.parts) if form.offload else 0
    assert form.host_bytes(shape, layers, torch.device("cuda"), 200) == pinned
    assert form.host_bytes(shape, layers, torch.device("cpu"), 200) == 0


def test_a_byte_more_than_a_power_of_two_takes_the_next_one_of_pinned_memory():
    """Codes of keys and of values, then a scale for each."""
    shape = AttentionShape(heads=1, kv_heads=1, dim=17, value_dim=16, dtype=torch.float32)
    assert CacheForm("int8", True).host_bytes(shape, 1, torch.device("cuda"), tokens=1) == 32 + 16 + 4 + 4


def test_a_plain_cache_is_the_one_without_copies():
    assert type(full_cache(CacheForm(), 10)) is FullCache


# The text.


@pytest.fixture(scope="module")
def text_of_ar(dec, prompt):
    """Plain decoding with a form of the cache, once for all methods; the usual form is `CacheForm()`."""

    @functools.cache
    def text_of_ar(form, length):
        return dec.generate(prompt, length, "ar", SAMPLING, options(form), return_logprobs=True)

    return text_of_ar


# Those that copy from the cache are below.
@pytest.mark.parametrize("method", some(methods(), ["ar", "tokenswift", "eagle3", "draft-model", "auto"]))
def test_every_method_gives_the_text_of_ar_with_the_same_cache(dec, prompt, text_of_ar, form, method):
    plain, expected = text_of_ar(CacheForm(), 40), text_of_ar(form, 40)
    out = dec.generate(prompt, 40, method, SAMPLING, options(form), return_logprobs=True)
    assert out.token_ids == expected.token_ids
    assert out.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
    # An offloaded cache changes nothing, a quantised one the model.
    assert (plain.logprobs == pytest.approx(expected.logprobs, abs=1e-9)) == (form.kv_dtype is None)
    # The plain model with transformers' own cache, which rounds what it is given.
    assert dec.audit(out).equal


@pytest.mark.parametrize("kv_dtype", LARGEST)
def test_greedy_ar_is_generate_with_a_cache_that_rounds(dec, model, prompt, kv_dtype):
    out = dec.generate(prompt, 50, "ar", SamplingParams(temperature=0), TokenSwiftOptions(kv_dtype=kv_dtype))
    assert out.token_ids == transformers_text(model, prompt, 50, past_key_values=rounding_cache(kv_dtype, model))


@pytest.mark.parametrize(
    ("method", "drafting"),
    [
        ("tokenswift", dict(cache="dynamic")),
        ("tokenswift", dict(cache="static")),
        ("tokenswift", dict(cache="full")),
        ("magicdec", dict(draft_cache="snapkv")),
        ("magicdec", dict(draft_cache="streaming")),
        ("triforce", dict(draft_budget=20)),
    ],
)
def test_draft_caches_are_filled_from_it(dec, prompt, text_of_ar, form, method, drafting):
    drafting = dict(tree=(1, 1, 1), sink=4) | drafting
    out = dec.generate(prompt, 40, method, SAMPLING, options(form, **drafting))
    assert out.token_ids == text_of_ar(form, 40).token_ids
    if form.kv_dtype is None:
        # What is copied from host memory is what would have been there without: as many drafts are accepted.
        plain = dec.generate(prompt, 40, method, SAMPLING, options(CacheForm(), **drafting))
        assert out.stats.accepted == plain.stats.accepted > 0


def filled(form, prompt):
    """A decoder, and full caches of a form and without, that hold the same text."""
    dec = Decoder(tiny_llama())
    caches = [full_cache(one, 100) for one in (form, CacheForm())]
    with torch.inference_mode(), dec.target.patched():
        for cache in caches:
            queries = dec.target.prefill(prompt, cache, observed=4)
    return caches, queries


@torch.inference_mode()
def test_what_draft_caches_take_is_what_was_rounded(form, prompt):
    """Of the first layer, whose keys and values do not depend on the cache."""
    (cache, plain), queries = filled(form, prompt)
    expected = [form.rounded(pairs[0][:, :, : len(prompt)]) for pairs in (plain.keys, plain.values)]
    index = torch.tensor([3, 0, 17])
    for keys, values, slots in (
        (*cache.span(5, 11), slice(5, 11)),
        (*cache.at(index), index),
        *[(key[None], value[None], slice(None)) for key, value in [cache.layer(0)]],
    ):
        assert torch.equal(keys[0], expected[0][:, :, slots]) and torch.equal(values[0], expected[1][:, :, slots])
    partial, recent = PartialCache(24, 4), RecentCache(24, 4, room=1)
    partial.append(cache, queries)
    recent.append(cache)
    assert partial.rebuilds == 1
    for head in range(expected[0].shape[1]):
        known = {tuple(row.tolist()) for row in expected[0][0, head]}
        assert all(tuple(row.tolist()) in known for row in partial.keys[0, 0, head, :24])
    # Sinks, and the newest ones in a ring.
    slots = [slot if slot < 4 else 4 + (slot - 4) % 20 for slot in range(20, 40)]
    assert torch.equal(recent.values[0][:, :, slots], expected[1][:, :, 20:40])


# That a cache is in host memory does not depend on its dtype.
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        pytest.param(form, dtype, marks=pytest.mark.slow if form.offload and dtype == torch.bfloat16 else [])
        for form in FORMS
        for dtype in (torch.float32, torch.bfloat16)
    ],
    ids=str,
)
def test_bit_for_bit(form, dtype, prompt, monkeypatch, with_native):
    model = tiny_llama(dtype)
    dec = Decoder(model, heads=all_heads(model), bitwise=True)
    expected = dec.generate(prompt, 50, "ar", SAMPLING, options(form), return_logprobs=True)
    for method in ("tokenswift", "medusa", "magicdec", "suffix", "auto"):
        out = dec.generate(prompt, 50, method, SAMPLING, options(form), return_logprobs=True)
        assert (out.token_ids, out.logprobs) == (expected.token_ids, expected.logprobs), method
    for cut, chunk in ((1, 7), (30, 64)):
        monkeypatch.setattr(target_module, "_PREFILL_CHUNK", chunk)
        context = prompt + expected.token_ids[:cut]
        rest = dec.generate(context, 50 - cut, "suffix", SAMPLING, options(form), return_logprobs=True)
        assert (rest.token_ids, rest.logprobs) == (expected.token_ids[cut:], expected.logprobs[cut:])


@pytest.fixture(params=["float32", "bfloat16", "a file's own"])
def whole(request, tmp_path, monkeypatch, with_native):
    """A decoder whose passes go through the library as a whole.

    A file's own formats are multiplied by bfloat16 everywhere, though hidden states are so only where that is fast.
    """
    if request.param == "a file's own":
        pytest.importorskip("gguf")
        monkeypatch.setattr(native, "multiplies", lambda dtype: True)
        from .test_quantised_model import write

        dec = load(write(tmp_path / "tiny.gguf", "Q8_0"))
        assert dec.model.dtype == torch.bfloat16
        return dec
    dtype = getattr(torch, request.param)
    if not native.multiplies(dtype):
        pytest.skip(f"the library multiplies no {dtype} here")
    return Decoder(tiny_llama(dtype))


def test_the_library_keeps_the_codes_that_pytorch_does_and_no_layer_is_decoded(whole, prompt, monkeypatch):
    """In a whole pass, where queries are observed, and layer by layer as beside a cache of another form."""
    dec, form = whole, CacheForm("int8")
    decode, passes = CacheForm.decode, []
    monkeypatch.setattr(CacheForm, "decode", lambda *given: (passes.append("decoded"), decode(*given)))

    def codes(apart=False, **how):
        cache = full_cache(form, 600)
        with torch.inference_mode(), dec.target.patched(), monkeypatch.context() as patched:
            if apart:
                patched.setattr(WholeModel, "writes", lambda *_: False)
            states = dec.target.prefill(9 * prompt, cache, **how)
        passes.append("done")
        return [part[:, :, :, : cache.length] for part in cache.parts], states

    dec.generate(prompt, 2, "ar")
    passes.clear()
    kept, _ = codes()
    observed, queries = codes(observed=4)
    assert "decoded" not in passes
    by_layer, queries_by_layer = codes(apart=True, observed=4)
    assert "decoded" in passes and len(9 * prompt) > 256
    for mine, beside, alone in zip(kept, observed, by_layer, strict=True):
        assert torch.equal(mine, beside) and torch.equal(mine, alone)
    assert all(torch.equal(queries[layer], queries_by_layer[layer]) for layer in (0, 1))


def test_codes_in_host_memory_have_the_bits_of_those_that_are_not(whole, prompt):
    texts = [
        whole.generate(prompt, 20, method, SAMPLING, options(CacheForm("int8", offload)), return_logprobs=True)
        for method, offload in (("ar", False), ("ar", True), ("suffix", True))
    ]
    assert len({(tuple(text.token_ids), tuple(text.logprobs)) for text in texts}) == 1


def test_beside_caches_of_other_forms_a_pass_has_the_bits_that_it_has_alone(whole, prompt):
    dec = whole
    forms = [CacheForm("int8"), CacheForm(), CacheForm("fp8"), CacheForm("int8")]

    def passed(together):
        caches = [full_cache(form, 100) for form in forms]
        with torch.inference_mode(), dec.target.patched():
            dec.target.refresh_weights()
            for count, cache in enumerate(caches, 10):
                dec.target.prefill(prompt[:count], cache)
            tree = some_tree()
            groups = [range(4)] if together else [[n] for n in range(4)]
            outs = [dec.target.forward([tree] * len(own), [caches[n] for n in own]) for own in groups]
        return [one.logits for out in outs for one in out]

    for mine, alone in zip(passed(together=True), passed(together=False), strict=True):
        assert torch.equal(mine, alone)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_text_of_open_length_grows(form, dtype, monkeypatch):
    monkeypatch.setattr("decoder.cache.full._SMALLEST_GROWTH", 16)
    dec, grown, enlarge = Decoder(tiny_llama(dtype, max_position_embeddings=120)), [], StoredCache.enlarge
    monkeypatch.setattr(StoredCache, "enlarge", lambda *given: (grown.append(given), enlarge(*given)))
    out = dec.generate([1, 2, 3], None, "suffix", SAMPLING, options(form))
    assert len(grown) > 1
    assert out.token_ids == dec.generate([1, 2, 3], 117, "ar", SAMPLING, options(form)).token_ids


def test_texts_of_a_batch_are_those_they_would_be_alone(dec, form):
    prompts = [random_tokens(n, n) for n in (3, 40, 17)]
    samplings = [SamplingParams(seed=n) for n in range(3)]
    together = dec.generate_batch(prompts, [30, 12, 25], "auto", samplings, options(form))
    for prompt, new, sampling, out in zip(prompts, [30, 12, 25], samplings, together, strict=True):
        assert out.token_ids == dec.generate(prompt, new, "ar", sampling, options(form)).token_ids


def test_host_memory_bounds_how_many_offloaded_texts_run_together(dec, monkeypatch):
    prompts, form, together = [[1, 2, 3], [4] * 30, [5] * 9, [6]], CacheForm(None, True), []
    expected = [dec.generate(prompt, 20, "ar", SAMPLING).token_ids for prompt in prompts]
    host_bytes, step = CacheForm.host_bytes, Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: (together.append(len(engine.running)), step(engine))[1])
    # As if the model were on a device beside this host, whose memory has room for the longest text and another one.
    monkeypatch.setattr(
        CacheForm,
        "host_bytes",
        lambda form, shape, layers, device, tokens: host_bytes(form, shape, layers, torch.device("cuda"), tokens),
    )
    needed = form.host_bytes(dec.target.attention_shape, dec.target.layers, None, tokens=50)
    free = {"bytes": 1.6 * needed / 0.6}
    monkeypatch.setattr("decoder.decoder.memory_for_caches", lambda *_: CacheBytes(2**30, int(free["bytes"])))
    outs = dec.generate_batch(prompts, 20, "ar", SAMPLING, options(form))
    assert [out.token_ids for out in outs] == expected and max(together) == 2
    together.clear()
    dec.generate_batch(prompts, 20, "ar", SAMPLING, options(CacheForm()))
    assert max(together) == 4
    free["bytes"] = needed
    with pytest.raises(ValueError, match=r"prompt 1: its cache of [\d,]+ bytes in host memory does not fit there"):
        dec.generate_batch(prompts, 20, "ar", SAMPLING, options(form))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_prefixes_are_reused_by_texts_with_the_same_cache_alone(form, dtype, prompt):
    model = tiny_llama(dtype)
    dec = Decoder(model, prefix_cache_bytes=2**22)
    first = dec.generate(prompt, 30, "suffix", SAMPLING, options(form))
    longer = prompt + first.token_ids[:20]
    other = dec.generate(longer, 30, "suffix", SAMPLING)
    assert other.stats.reused_tokens == 0
    again = dec.generate(longer, 30, "suffix", SAMPLING, options(form), return_logprobs=True)
    assert again.stats.reused_tokens >= len(prompt)
    dec.prefixes = None
    fresh = dec.generate(longer, 30, "ar", SAMPLING, options(form), return_logprobs=True)
    assert again.token_ids == fresh.token_ids
    assert again.logprobs == (fresh.logprobs if dec.bitwise else pytest.approx(fresh.logprobs, abs=1e-9))


def test_prefixes_of_another_model_are_noticed(form, prompt):
    model = tiny_llama(torch.float32)
    dec = Decoder(model, bitwise=False)
    dec.prefixes = prefix_reuse(dec.target, 2**22)
    dec.generate(prompt, 10, "ar", SAMPLING, options(form))
    # As a change that PyTorch does not count.
    state = dec.prefixes._model_state
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    dec.prefixes._check_model = lambda: setattr(dec.prefixes, "_model_state", state)
    out = dec.generate(prompt, 10, "ar", SAMPLING, options(form))
    assert out.stats.reused_tokens == 0


# Copies beside the computation.


class Streams:
    """Stands in for CUDA's streams: all runs at once, and the order of what was asked for is kept."""

    def __init__(self, monkeypatch):
        self.log = []
        monkeypatch.setattr(stored, "copy_stream", lambda device: self)
        monkeypatch.setattr(stored, "has_own_memory", lambda device: True)
        monkeypatch.setattr(CacheForm, "working_layers", lambda form, device: 2)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        fill = StoredCache._fill

        def filled(cache, layer_idx):
            self.log.append(("fill", layer_idx))
            fill(cache, layer_idx)

        monkeypatch.setattr(StoredCache, "_fill", filled)
        seen_by = StoredCache.seen_by

        def attended(cache, count, layer_idx):
            self.log.append(("layer runs", layer_idx))
            return seen_by(cache, count, layer_idx)

        monkeypatch.setattr(StoredCache, "seen_by", attended)
        for name in ("_move", "at", "copying", "span"):
            monkeypatch.setattr(FullCache, name, self._logged(name, getattr(FullCache, name)))

    def _logged(self, name, read):
        def logged(cache, *args):
            self.log.append(("host reads", name))
            return read(cache, *args)

        return logged

    def synchronize(self):
        self.log.append(("host waits", None))

    def wait_stream(self, other):
        self.log.append(("copies wait", None))

    def wait_event(self, event):
        self.log.append(("pass waits", event))

    def record_event(self):
        return self.log[-1][1]


def test_the_next_layer_is_copied_while_a_layer_runs(monkeypatch, prompt):
    model = tiny_llama(num_hidden_layers=4)
    dec = Decoder(model, heads=random_heads(model))
    expected = dec.generate(prompt, 40, "ar", SAMPLING)
    streams = Streams(monkeypatch)
    form = CacheForm(None, True)
    # The first one also reads the cache between passes.
    for method in ("tokenswift", "suffix"):
        streams.log.clear()
        assert dec.generate(prompt, 40, method, SAMPLING, options(form)).token_ids == expected.token_ids
    one_pass = []
    for layer in range(4):
        if not layer:
            one_pass += [("copies wait", None), ("fill", 0)]
        one_pass.append(("pass waits", layer))
        if layer < 3:
            one_pass += [("copies wait", None), ("fill", layer + 1)]
        one_pass.append(("layer runs", layer))
    assert streams.log[: 2 * len(one_pass)] == 2 * one_pass


@pytest.mark.parametrize("form", [CacheForm(None, True), CacheForm("int8", True), CacheForm("fp8", True)], ids=str)
def test_the_host_waits_before_it_reads_what_a_device_writes(monkeypatch, prompt, form):
    model = tiny_llama()
    dec = Decoder(model, heads=random_heads(model), prefix_cache_bytes=2**22)
    expected = dec.generate(prompt, 40, "ar", SAMPLING, options(CacheForm(form.kv_dtype)))
    streams = Streams(monkeypatch)
    for method in ("tokenswift", "magicdec"):
        assert dec.generate(prompt, 40, method, SAMPLING, options(form)).token_ids == expected.token_ids
    reads = {name for what, name in streams.log if what == "host reads"}
    assert reads == {"_move", "at", "copying", "span"}
    for index, (what, name) in enumerate(streams.log):
        if what == "host reads":
            # `span` reads when it is decoded, which is told behind it.
            near = streams.log[index + 1 if name == "span" else index - 1]
            assert near == ("host waits", None), name


@pytest.mark.slow
def test_behind_32768_tokens_of_the_reference_model_the_text_is_the_same_with_the_bytes_that_are_planned(monkeypatch):
    """In a CPU's memory, some two minutes; the bytes of other devices are those of `test_bytes_are_those_planned`."""
    data = Path(__file__).parents[2] / "data"
    dec = load(data / "reference-model", data / "heads-gated")
    prompt = random_tokens(32_768 - 64, 1, 4000)
    form, caches = CacheForm(None, True), []
    made = new_sequence.full_cache
    monkeypatch.setattr(
        new_sequence, "full_cache", lambda *given, **how: caches.append(made(*given, **how)) or caches[-1]
    )

    def text(method, **how):
        out = dec.generate(
            prompt, 64, method, SAMPLING, TokenSwiftOptions(**how), ignore_eos=True, return_logprobs=True
        )
        return out.token_ids, out.logprobs

    expected = text("ar")
    assert dec.bitwise and text("auto", offload=True) == expected
    plain, offloaded, sizes = *caches, (dec.target.attention_shape, dec.target.layers, torch.device("cpu"))
    assert offloaded.nbytes == form.device_bytes(*sizes, tokens=offloaded.capacity)
    # Of four layers one is where passes look at it.
    assert offloaded.device_bytes < 0.26 * plain.nbytes and offloaded.length >= 32_767


def test_a_cache_that_is_still_empty_can_be_enlarged():
    cache = full_cache(CacheForm("int8"), 4, growable=True)
    dec = Decoder(tiny_llama(), bitwise=False)
    with torch.inference_mode(), dec.target.patched():
        dec.target.prefill(list(range(30)), cache)
    assert cache.length == 30 and cache.span(0, 30)[0].shape[3] == 30


@pytest.mark.parametrize("form", [CacheForm(None, True), CacheForm("int8", True)], ids=str)
def test_keys_and_values_of_different_sizes_are_copied_each_to_their_own_place(monkeypatch, form):
    Streams(monkeypatch)
    cache, generator = full_cache(form, 20), torch.Generator().manual_seed(0)
    cache.prepare(Layout.of_full(3))
    given = [torch.randn(3, 1, 2, 10, dim, generator=generator) for dim in (8, 4)]
    for start, end in ((0, 6), (6, 10)):
        for layer in range(3):
            seen = cache.update(*(states[layer][:, :, start:end] for states in given), layer)
            for found, states in zip(seen, given, strict=True):
                assert torch.equal(found, form.rounded(states[layer][:, :, :end]))
        cache.keep(range(end - start))
    shape = AttentionShape(heads=2, kv_heads=2, dim=8, value_dim=4, dtype=torch.float32)
    assert cache.device_bytes == form.device_bytes(shape, 3, torch.device("cuda"), 20)


def test_a_pass_that_failed_leaves_no_layer_behind(monkeypatch):
    model = tiny_llama(num_hidden_layers=4)
    dec = Decoder(model)
    streams = Streams(monkeypatch)
    cache = full_cache(CacheForm(None, True), 50)
    broken = []
    model.model.layers[2].register_forward_hook(lambda *args: 1 / 0 if broken else None)
    with torch.inference_mode(), dec.target.patched():
        dec.target.refresh_weights()
        broken.append(True)
        with pytest.raises(ZeroDivisionError):
            dec.target.prefill([1, 2, 3], cache)
        broken.clear()
        streams.log.clear()
        dec.target.prefill([1, 2, 3], cache)
    assert [layer for what, layer in streams.log if what == "fill"] == [0, 1, 2, 3]


# Bad input.


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(kv_dtype="int4"), "kv_dtype must be one of int8, fp8, not 'int4'"),
        (dict(kv_dtype=8), "kv_dtype must be one of int8, fp8, not 8"),
        (dict(offload="yes"), "offload must be true or false, not 'yes'"),
    ],
)
def test_wrong_options_are_named(wrong, words):
    with pytest.raises(ValueError, match=words):
        TokenSwiftOptions(**wrong)
