"""Bit for bit on CUDA: passes of one width, recorded; here a tape and stand-ins take the place of CUDA and kernels."""

import time
from itertools import pairwise, product
from statistics import median

import pytest
import torch

from decoder import Decoder, SamplingParams, TokenSwiftOptions, methods
from decoder.backends import bitwise_check
from decoder.backends.base import FREE, PassRule
from decoder.backends.cuda import attention_check, backend, bitwise_split_kv
from decoder.backends.cuda.attention_kinds import ByPosition
from decoder.backends.modules import ModulePass
from decoder.backends.norms import FusedNorm
from decoder.sampling import filters

from .conftest import all_heads, random_tokens, some, tiny_llama
from .tape import TapeRecorder
from .test_families import FAMILIES, tiny
from .test_graphs import Unrecorded

SAMPLING = SamplingParams(seed=3, min_p=0.05, repetition_penalty=1.1, penalty_window=20)
OPTIONS = TokenSwiftOptions(tree=(1, 2, 2), ngrams=2, budget=40)
WIDTH = 16
NEW = 16
KERNELS = bitwise_split_kv.bitwise_split_kv_attention


FILTERED = SamplingParams(seed=3, temperature=1.2, top_p=0.9, eta_cutoff=0.01)


@pytest.fixture(autouse=True)
def narrow(monkeypatch, request):
    """Fewer rows than on CUDA, since each of them is a loop of a stand-in; chunks not much wider."""
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(backend, "_WIDTH", WIDTH)
    monkeypatch.setattr(backend, "_CHUNKS", (48,))


@pytest.fixture(scope="module")
def prompt():
    return random_tokens(75, 4)


def on_cuda(model, recorder=None, bitwise=True, **others):
    """A decoder that runs its passes as on CUDA."""
    dec = Decoder(model, bitwise=False, **others)
    dec.target.use(backend.CudaBackend(dec.target, recorder or TapeRecorder()))
    dec.target.make_bitwise(bitwise)
    return dec


def generated(dec, prompt, method="ar", new=NEW, options=OPTIONS, sampling=SAMPLING):
    out = dec.generate(prompt, new, method, sampling, options, return_logprobs=True, top_logprobs=3)
    return out.token_ids, out.logprobs, out.top_logprobs


METHODS = [tuple(methods()[part::3]) for part in range(3)]


@pytest.mark.parametrize(
    "dtype, names",
    some(product([torch.float32, torch.bfloat16], METHODS), [(torch.bfloat16, names) for names in METHODS]),
    ids=str,
)
def test_every_method_gives_the_bits_of_plain_decoding(as_on_cuda, prompt, dtype, names, monkeypatch):
    widths, run = set(), ModulePass.run_ids

    def counted(self, logits, ids, cache, new, *others):
        if isinstance(new[0], ByPosition):
            widths.add(ids.shape[1])
        return run(self, logits, ids, cache, new, *others)

    model = tiny_llama(dtype)
    small = tiny_llama(dtype, seed=2, num_hidden_layers=1) if {"triforce", "draft-model"} & set(names) else None
    dec = on_cuda(model, heads=all_heads(model), draft_model=small)
    assert dec.bitwise and "16 tokens in each pass, 48 of a prompt" in dec.report()
    monkeypatch.setattr(ModulePass, "run_ids", counted)
    plain, replayed = generated(dec, prompt), dec.target.backend.recorder.replayed
    for name in names:
        assert generated(dec, prompt, name) == plain, name
    assert dec.target.backend.recorder.replayed > replayed
    assert widths == {WIDTH, 48}


def test_neither_cuts_nor_other_texts_change_a_bit(as_on_cuda, prompt):
    dec = on_cuda(tiny_llama(torch.float32))
    tokens, *scores = plain = generated(dec, prompt)
    for cut in (1, 13):
        rest = generated(dec, prompt + tokens[:cut], "suffix", NEW - cut)
        assert rest == (tokens[cut:], *(score[cut:] for score in scores))
    outs = dec.generate_batch([prompt, prompt[:9]], NEW, "suffix", SAMPLING, OPTIONS, return_logprobs=True)
    assert (outs[0].token_ids, outs[0].logprobs) == plain[:2]
    # Without wider chunks.
    dec.target.bitwise.rule = dec.target.bitwise.rule._replace(chunk=None)
    assert generated(dec, prompt) == plain


def test_the_kind_of_cache_changes_no_bit(as_on_cuda, prompt, monkeypatch):
    model = tiny_llama(torch.float32)
    dec = on_cuda(model)
    tokens, *_ = plain = generated(dec, prompt)
    assert generated(dec, prompt, "suffix", options=TokenSwiftOptions(offload=True)) == plain
    assert generated(on_cuda(model, Unrecorded()), prompt, "prompt-lookup") == plain
    monkeypatch.setattr("decoder.cache.full._SMALLEST_GROWTH", 16)
    monkeypatch.setattr("decoder.cache.pool._SMALLEST_STEP", 16)
    stream, growing = dec.stream(prompt, None, "suffix", SAMPLING), []
    while len(growing) < NEW:
        growing += next(stream).token_ids
    assert growing[:NEW] == tokens


@pytest.mark.parametrize("part", [*(own.field for own in filters.FILTERS if own.sums), "log_softmax"])
def test_sums_over_the_vocabulary_do_not_follow_from_the_number_of_nodes(as_on_cuda, prompt, part, monkeypatch):
    """On a device whose sums do: it would show in the log-probabilities."""

    def leaning(plain):
        return lambda logits, *args: plain(logits * (1 + 2**-20 * (logits.ndim > 1 and len(logits) > 1)), *args)

    dec = on_cuda(tiny_llama(torch.float32))
    if part == "log_softmax":
        monkeypatch.setattr(torch.Tensor, part, leaning(torch.Tensor.log_softmax))
    else:
        leant = tuple(own._replace(apply=leaning(own.apply)) if own.field == part else own for own in filters.FILTERS)
        monkeypatch.setattr(filters, "FILTERS", leant)
    expected = generated(dec, prompt, sampling=FILTERED)
    assert generated(dec, prompt, "prompt-lookup", sampling=FILTERED) == expected


def test_prompts_are_cut_where_passes_may_end():
    def lengths(rule, count, size=512):
        return [end - start for start, end in pairwise(rule.borders(count, size))]

    fixed = PassRule(64)
    for count in (0, 1, 63, 64, 100, 512, 700, 5000):
        assert lengths(FREE, count) == ([count % 512] if count % 512 else []) + [512] * (count // 512)
        assert sum(lengths(fixed, count)) == count and set(lengths(fixed, count)[1:]) <= {64}
        wide = lengths(fixed._replace(chunk=512), count)
        assert sum(wide) == count and wide[len(wide) - count // 512 :] == [512] * (count // 512)
        assert all(length <= 64 for length in wide[: len(wide) - count // 512])
    assert lengths(fixed._replace(chunk=512), 700) == [60, 64, 64, 512]


def test_it_is_off_unless_it_is_asked_for(as_on_cuda):
    dec = on_cuda(tiny_llama(torch.float32), bitwise="auto")
    assert not dec.bitwise and "on CUDA only where it is asked for" in dec.report()
    with pytest.raises(ValueError, match="bitwise cannot be had here: a mixture of experts"):
        on_cuda(tiny("mixtral", torch.float32))


def test_heads_whose_addresses_are_not_aligned_are_refused(as_on_cuda):
    with pytest.raises(ValueError, match="bitwise cannot be had here: keys of 6 numbers and values of 6 do not fill"):
        on_cuda(tiny_llama(torch.float32, hidden_size=24))


def replaced_forward(model, lean):
    """Change one layer's products by ``lean(x)`` for its input."""
    layer = model.model.layers[0].mlp.up_proj
    forward = layer.forward
    layer.forward = lambda x: forward(x) * (1 + 2**-8 * lean(x))
    return model


def test_products_whose_rows_depend_on_their_place_are_caught(as_on_cuda):
    model = replaced_forward(tiny_llama(torch.float32), lambda x: torch.arange(x.shape[-2])[:, None] > 5)
    with pytest.raises(
        ValueError, match=r"bitwise cannot be had here: .*up_proj gives a row other bits at another place"
    ):
        on_cuda(model)


def test_norms_whose_rows_depend_on_their_place_are_caught(as_on_cuda):
    """In whole passes, as everything else that is no product."""
    model = tiny_llama(torch.float32)
    norm = model.model.layers[1].input_layernorm
    forward = norm.forward
    norm.forward = lambda x: forward(x) * (1 + 2**-8 * (torch.arange(x.shape[-2])[:, None] > 2))
    with pytest.raises(ValueError, match="bitwise cannot be had here: a token's"):
        on_cuda(model)


def test_chunks_are_as_wide_as_all_passes_where_products_depend_on_the_number_of_rows(as_on_cuda, prompt):
    dec = on_cuda(replaced_forward(tiny_llama(torch.float32), lambda x: float(x.shape[-2] > WIDTH)))
    assert dec.bitwise and dec.target.bitwise.rule.chunk is None
    assert generated(dec, prompt, "suffix") == generated(dec, prompt)


def test_attention_that_is_wrong_or_fails_is_caught(as_on_cuda, monkeypatch):
    right = bitwise_split_kv.bitwise_split_kv_attention
    for wrong, words in (
        (lambda *args: right(*args) + 1, "differ from the plain function's"),
        (lambda *args: 1 / 0, "ZeroDivisionError"),
    ):
        monkeypatch.setattr(bitwise_split_kv, "bitwise_split_kv_attention", wrong)
        with pytest.raises(ValueError, match=f"bitwise cannot be had here: .*{words}"):
            on_cuda(tiny_llama(torch.float32))


def test_settings_of_products_are_those_of_the_passes_and_then_the_users(as_on_cuda, prompt):
    matmul = torch.backends.cuda.matmul
    names = (
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    )
    dec, seen = on_cuda(tiny_llama(torch.bfloat16)), []
    before = [getattr(matmul, name) for name in names]
    precision = matmul.fp32_precision
    try:
        hook = dec.model.model.norm.register_forward_hook(
            lambda *_: seen.append([getattr(matmul, name) for name in names])
        )
        generated(dec, prompt, new=3)
        hook.remove()
        assert seen and not any(map(any, seen))
        assert [getattr(matmul, name) for name in names] == before and any(before)
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
        generated(dec, prompt, new=3)
        assert not matmul.allow_bf16_reduced_precision_reduction_split_k
        matmul.fp32_precision = "tf32"
        generated(dec, prompt, new=3)
        with pytest.raises(ValueError, match="bitwise cannot be had here: float32 products are rounded to TF32"):
            on_cuda(tiny_llama(torch.float32))
    finally:
        matmul.fp32_precision = precision
        matmul.allow_bf16_reduced_precision_reduction = before[0]


@pytest.mark.parametrize(
    "family",
    # A minute in all, for what the families' own tests and those above show apart.
    some(FAMILIES, ["gpt2", "granite", "gemma"]),
)
def test_families_hold_it_or_say_why_not(as_on_cuda, prompt, family):
    model_type, overrides = FAMILIES[family]
    model = tiny(model_type, torch.float32, **overrides)
    try:
        dec = on_cuda(model)
    except ValueError as error:
        assert "bitwise cannot be had here" in str(error)
        assert "mixture of experts" in str(error)
        return
    assert generated(dec, prompt, "suffix", 6) == generated(dec, prompt, new=6)


def test_the_kernels_themselves_in_a_generation(as_on_cuda, prompt, monkeypatch):
    """They read buffers of all layers, and the slots that passes hand over."""
    pytest.importorskip("triton", reason="Triton is built for Linux only")
    from .triton_emulation import repair_emulation

    repair_emulation()
    monkeypatch.setattr(backend, "_WIDTH", 4)
    monkeypatch.setattr(backend, "_CHUNKS", ())
    monkeypatch.setattr(attention_check, "kernel_fault", lambda shape, device: None)
    monkeypatch.setattr(bitwise_check, "model_fault", lambda target: None)
    model = tiny_llama(torch.float32, num_hidden_layers=1)
    expected = generated(Decoder(model, bitwise=False), prompt[:6], new=3)
    monkeypatch.setattr(bitwise_split_kv, "bitwise_split_kv_attention", KERNELS)
    # Kernels that are emulated leave nothing on a tape.
    dec = on_cuda(model, Unrecorded())
    plain = generated(dec, prompt[:6], new=3)
    assert plain[0] == expected[0] and plain[1] == pytest.approx(expected[1], abs=1e-4)
    assert generated(dec, prompt[:6], "suffix", 3) == plain


def larger_llama(dtype, **overrides):
    """Of sizes at which libraries have a choice of kernels."""
    sizes = dict(hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=2)
    model = tiny_llama(dtype, **{**sizes, **overrides})
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    return model.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_every_method_gives_the_bits_of_plain_decoding(dtype):
    """Behind more than a split of the prompt; the texts cross several places where tails begin to move."""
    model = larger_llama(dtype)
    small = larger_llama(dtype, seed=2, num_hidden_layers=1)
    dec = Decoder(model, heads=all_heads(model), draft_model=small, bitwise=True)
    assert dec.bitwise, dec.report()
    prompt = random_tokens(1500, 4)
    plain = generated(dec, prompt, new=150)
    for name in methods():
        for options in (OPTIONS, TokenSwiftOptions(tree=(1, 3, 3, 3), ngrams=20, budget=256)):
            assert generated(dec, prompt, name, 150, options) == plain, (name, dec.report())
    tokens, *scores = plain
    for cut in (1, 40, 101):
        rest = generated(dec, prompt + tokens[:cut], "suffix", 150 - cut)
        assert rest == (tokens[cut:], *(score[cut:] for score in scores)), dec.report()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_norms_have_the_same_bits_for_any_number_of_rows(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    for size in (64, 576, 4096, 5120):
        x, weight = (torch.randn(*shape, size, generator=generator, device="cuda").to(dtype) for shape in ((512,), ()))
        norm = FusedNorm(weight, 1e-5)
        whole = norm(x)
        for rows in (1, 2, 7, 64, 300):
            assert torch.equal(norm(x[-rows:]), whole[-rows:]), (size, rows)


@pytest.mark.gpu
def test_on_a_gpu_it_costs_little():
    """A model of a billion parameters in bfloat16: a token of `ar` and reading a prompt, in turn with and without."""
    shape = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8)
    with torch.device("cuda"):
        model = tiny_llama(torch.bfloat16, **shape, num_hidden_layers=16, vocab_size=32_000)
    decoders = [Decoder(model, bitwise=on) for on in (False, True)]
    assert decoders[1].bitwise, decoders[1].report()
    prompt = random_tokens(2048, 4, 32_000)
    decoding, prefill = [], []
    for _ in range(6):
        stats = [dec.generate(prompt, 100, "ar", SAMPLING).stats for dec in decoders]
        decoding.append(stats[1].decode_seconds / stats[0].decode_seconds)
        prefill.append(stats[1].prefill_seconds / stats[0].prefill_seconds)
        time.sleep(0.1)
    # The first turn records.
    print(f"decoding {median(decoding[1:]):.3f}, prefill {median(prefill[1:]):.2f}\n{decoders[1].report()}")
    assert median(decoding[1:]) < 1.25
