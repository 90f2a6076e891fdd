"""Fused rotary embedding: the same function as transformers' own, or left alone; on a GPU, or emulated on a CPU."""

import sys
from itertools import islice

import pytest
import torch
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.olmo2 import modeling_olmo2

pytest.importorskip("triton", reason="Triton is built for Linux only")

from decoder import Decoder
from decoder.backends.cuda import rotary
from decoder.backends.cuda.cuda_graphs import CudaGraphs
from decoder.backends.cuda.rotary import FusedRotary, fused_rotary, rotary_replaced, rotate
from decoder.cache.full import FullCache
from decoder.model.target import Target

from .conftest import clocked, random_heads, some, tiny_llama, with_recorder
from .tape import TapeRecorder, eager_rotation
from .test_families import FAMILIES, OF_EACH_KIND, tiny
from .test_graphs import NARROW, SAMPLING, Unrecorded

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
# One rounding of the result, where arithmetic is wider; Triton's emulation cuts bfloat16 off.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2**-11}
TOLERANCE[torch.bfloat16] = 2**-8 if DEVICE.type == "cuda" else 2**-7
OWN = modeling_llama.apply_rotary_pos_emb


def transposed(batch, tokens, heads, groups, dim, **like):
    """As most models lay queries and keys out."""
    return tuple(torch.randn(batch, tokens, count, dim, **like).transpose(1, 2) for count in (heads, groups))


def dense(batch, tokens, heads, groups, dim, **like):
    return tuple(torch.randn(batch, count, tokens, dim, **like) for count in (heads, groups))


def sliced(batch, tokens, heads, groups, dim, **like):
    """One projection for both, of which a part of each head is rotated (phi, persimmon)."""
    projected = torch.randn(batch, tokens, heads + groups, dim + 16, **like)[..., :dim].transpose(1, 2)
    return projected[:, :heads], projected[:, heads:]


@pytest.fixture
def counted(monkeypatch):
    """Calls of the kernel, by the shapes of the queries."""
    calls, launch = [], rotary.rotate
    monkeypatch.setattr(rotary, "rotate", lambda *arguments: calls.append(arguments[0].shape) or launch(*arguments))
    return calls


def angles(batch, tokens, dim, **like):
    """Any numbers: the two halves of neither are alike."""
    return tuple(torch.randn(batch, tokens, dim, **like) for _ in range(2))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", [transposed, dense, sliced])
@pytest.mark.parametrize(
    "batch, tokens, heads, groups, dim",
    [
        (1, 1, 4, 2, 16),
        (2, 3, 6, 1, 80),  # a head size that is no power of two
        (3, 2, 3, 3, 96),
        (1, 2, 1, 7, 128),  # more keys than queries, neither a multiple of a block
        (1, 2, 5, 2, 256),
        (2, 1, 70, 2, 8),
    ],
)
def test_as_transformers_own_in_all_shapes_types_and_layouts(batch, tokens, heads, groups, dim, layout, dtype):
    like = dict(device=DEVICE, dtype=dtype)
    torch.manual_seed(0)
    q, k = layout(batch, tokens, heads, groups, dim, **like)
    for alike in {1, batch}:
        cos, sin = angles(alike, tokens, dim, **like)
        exact = OWN(q.double(), k.double(), cos.double(), sin.double())
        for actual, expected, own in zip(rotate(q, k, cos, sin), exact, OWN(q, k, cos, sin), strict=True):
            assert (actual.dtype, actual.shape) == (own.dtype, own.shape)
            # The stride of a single one means nothing.
            strides = zip(own.shape, actual.stride(), own.stride(), strict=True)
            assert all(stride == own_stride for size, stride, own_stride in strides if size > 1)
            torch.testing.assert_close(
                actual.double(), expected, rtol=TOLERANCE[dtype], atol=min(TOLERANCE[dtype], 1e-6)
            )


def test_cosines_and_sines_may_lie_apart_and_be_wider():
    q, k = (x.bfloat16() for x in transposed(2, 4, 3, 2, 16, device=DEVICE))
    table = torch.randn(4, 2, 3, 24, device=DEVICE).transpose(0, 1)
    cos, sin = table[..., 1, :16], table[..., 2, 3:19]
    exact = OWN(q.double(), k.double(), cos.double(), sin.double())
    for actual, expected in zip(rotate(q, k, cos, sin), exact, strict=True):
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[torch.bfloat16], atol=1e-6)


NONE = {"gpt2", "gpt_bigcode", "opt"}  # no rotary embedding
PAIRS = {"cohere", "cohere2", "glm", "glm4", "ernie4_5", "helium"}  # neighbours are rotated in pairs
PARTIAL = {"gpt_neox", "glm4_moe"}  # a part of each head, chosen inside the function


@pytest.fixture(scope="module", params=some(FAMILIES, OF_EACH_KIND))
def family(request):
    model_type, overrides = FAMILIES[request.param]
    return model_type, tiny(model_type, torch.float32, **overrides)


def test_a_fused_rotation_is_the_familys_own_function(family, counted):
    model_type, model = family
    for dtype, tolerance in ((torch.bfloat16, 2**-5), (torch.float32, 1e-5)):
        found = fused_rotary(model.to(dtype).modules(), DEVICE)
        assert len(found) == (model_type not in NONE | PAIRS)
        for fused in found.values():
            assert {kind for kind, _ in fused.dtypes} == {dtype}
            for _, angle_dtype in fused.dtypes:
                torch.manual_seed(1)
                q, k = transposed(2, 3, 4, 1, 32, device=DEVICE, dtype=dtype)
                cos, sin = angles(2, 3, 32, device=DEVICE, dtype=angle_dtype)
                with torch.inference_mode():
                    counted.clear()
                    pairs = zip(fused(q, k, cos, sin), fused.original(q, k, cos, sin), strict=True)
                    assert len(counted) == 1
                    for actual, expected in pairs:
                        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=2 * tolerance)


def test_float64_stays_as_it_is_and_wider_angles_are_told_apart():
    """Llama's function would return them in their own dtype, olmo's in that of the queries."""
    assert not fused_rotary(tiny_llama().modules(), DEVICE)
    half, single = torch.bfloat16, torch.float32
    for model_type, owner, dtypes in (
        ("llama", modeling_llama, {(half, half)}),
        ("olmo2", modeling_olmo2, {(half, half), (half, single)}),
    ):
        (fused,) = fused_rotary(tiny(model_type, half).modules(), DEVICE).items()
        assert (fused[0], fused[1].dtypes) == (owner, dtypes)


def changed(original, change):
    def function(q, k, cos, sin, unsqueeze_dim=1):
        return original(*change(q, k, cos, sin), unsqueeze_dim)

    return function


def raising(q, k, cos, sin):
    raise KeyError("another signature")


OTHERS = {
    "turned backwards": changed(OWN, lambda q, k, cos, sin: (q, k, cos, -sin)),
    "queries alone": lambda q, k, cos, sin: (OWN(q, k, cos, sin)[0], k),
    "first half's angles": changed(OWN, lambda q, k, *both: (q, k, *(x.chunk(2, -1)[0].repeat(1, 1, 2) for x in both))),
    "other way round": lambda q, k, cos, sin: OWN(q, k, cos, sin)[::-1],
    "queries only": lambda q, cos, sin: q,
    "one tensor": lambda q, k, cos, sin: OWN(q, k, cos, sin)[0],
    "wider": lambda q, k, cos, sin: tuple(x.double() for x in OWN(q, k, cos, sin)),
    "three": lambda q, k, cos, sin: (*OWN(q, k, cos, sin), None),
    "no number": lambda q, k, cos, sin: tuple(x * torch.nan for x in OWN(q, k, cos, sin)),
    "raising": raising,
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_functions_are_left_alone(other, monkeypatch):
    """Also in a family whose layers do not tell their head size."""
    for model, owner in ((tiny_llama(torch.float32), modeling_llama), (tiny("gpt_neox"), modeling_gpt_neox)):
        monkeypatch.setattr(owner, "apply_rotary_pos_emb", other)
        assert not fused_rotary(model.float().modules(), DEVICE)


def test_memory_that_runs_out_is_told(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(rotary, "rotate", full)
    with pytest.raises(torch.OutOfMemoryError):
        fused_rotary(tiny_llama(torch.float32).modules(), DEVICE)


def known():
    torch.manual_seed(0)
    like = dict(device=DEVICE, dtype=torch.float32)
    return [*transposed(2, 4, 4, 4, 16, **like), *angles(2, 4, 16, **like)]


UNKNOWN = {
    "an argument more": lambda *known: (*known, 1),
    "float64": lambda *known: [x.double() for x in known],
    "bfloat16": lambda *known: [x.bfloat16() for x in known],
    "wider angles": lambda q, k, cos, sin: (q, k, cos.double(), sin.double()),
    "a wider sine": lambda q, k, cos, sin: (q, k, cos, sin.double()),
    "wider keys": lambda q, k, cos, sin: (q, k.double(), cos, sin),
    "another device": lambda *known: [x.to("meta") for x in known],
    "numbers apart": lambda q, k, cos, sin: (torch.cat((q, q), -1)[..., ::2], k, cos, sin),
    "numbers of keys apart": lambda q, k, cos, sin: (q, torch.cat((k, k), -1)[..., ::2], cos, sin),
    "cosines apart": lambda q, k, cos, sin: (q, k, torch.cat((cos, cos), -1)[..., ::2], sin),
    "sines apart": lambda q, k, cos, sin: (q, k, cos, torch.cat((sin, sin), -1)[..., ::2]),
    "an odd size": lambda *known: [x[..., :15] for x in known],
    "one head seen as many": lambda q, k, cos, sin: (q[:, :1].expand(q.shape), k, cos, sin),
    "a part of each head": lambda q, k, cos, sin: (q, k, cos[..., :8], sin[..., :8]),
    "a part of the sines": lambda q, k, cos, sin: (q, k, cos, sin[..., :8]),
    "angles of one token": lambda q, k, cos, sin: (q, k, cos[:, :1], sin[:, :1]),
    "angles per head": lambda q, k, cos, sin: (q, k, cos[:, None, 0], sin[:, None, 0]),
    "no batch": lambda q, k, cos, sin: (q[0], k[0], cos[0], sin[0]),
    "no keys": lambda q, k, cos, sin: (q, None, cos, sin),
    "other numbers of keys": lambda q, k, cos, sin: (q, k[:, :, :1], cos, sin),
}


@pytest.mark.parametrize("call", UNKNOWN.values(), ids=UNKNOWN)
def test_what_was_not_tried_is_the_original_s(call, counted):
    def original(*arguments):
        return arguments

    fused = FusedRotary(original, DEVICE, {(torch.float32, torch.float32)})
    with torch.inference_mode():
        arguments = tuple(call(*known()))
        assert all(given is taken for given, taken in zip(fused(*arguments), arguments, strict=True))
        assert not counted
        fused(*known())
        assert len(counted) == 1


def test_gradients_autocast_and_other_axes_are_the_originals(counted):
    fused = FusedRotary(OWN, DEVICE, {(torch.float32, torch.float32)})
    q, k, cos, sin = known()
    q.requires_grad_()
    fused(q, k, cos, sin)[0].sum().backward()
    assert q.grad is not None
    with torch.inference_mode():
        other_axes = fused(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)[0].transpose(1, 2)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            torch.testing.assert_close(fused(q, k, cos, sin)[0], other_axes)
        assert not counted
        torch.testing.assert_close(fused(q, k, cos, sin)[0], other_axes)
        assert len(counted) == 1


def rotary_decoder(dtype=torch.float32, **heads):
    model = tiny_llama(dtype)
    small = tiny_llama(dtype, seed=2, num_hidden_layers=1)
    return Decoder(model, heads=random_heads(model, **heads), draft_model=small)


@pytest.mark.parametrize("method", ["ar", "tokenswift", "tokenswift-fused", "magicdec", "triforce", "auto"])
def test_recorded_passes_rotate_in_one_call_and_give_the_same_text(as_on_cuda, counted, prompt, monkeypatch, method):
    # By the machine's clock `auto` may draft trees of ever other widths, whose passes are never replayed.
    clocked(monkeypatch, 0.1)
    expected = rotary_decoder(kind="gated").generate(prompt, 60, "ar", SAMPLING).token_ids
    assert not counted
    recorder = TapeRecorder()
    dec = with_recorder(rotary_decoder(kind="gated"), recorder)
    counted.clear()
    assert dec.generate(prompt, 60, method, SAMPLING, NARROW).token_ids == expected
    assert recorder.replayed > 5
    # One for each layer of each pass that ran; the trial's queries have three heads.
    calls = [shape for shape in counted if shape[1] == 4]
    layers = 1 if method in ("triforce", "auto") else 2  # the small model has one
    assert (
        layers * (recorder.rehearsed + recorder.recorded) <= len(calls) <= 2 * (recorder.rehearsed + recorder.recorded)
    )
    assert len(calls) < 40


def test_the_kernel_itself_in_a_generation(as_on_cuda, prompt, monkeypatch):
    """Over queries, keys and angles as a model hands them over."""
    calls = []
    monkeypatch.setattr(rotary, "rotate", lambda *arguments: calls.append(arguments[0].shape) or rotate(*arguments))
    expected = rotary_decoder().generate(prompt, 6, "ar", SAMPLING).token_ids
    # Kernels that are emulated leave nothing on a tape.
    dec = with_recorder(rotary_decoder(), Unrecorded())
    assert dec.generate(prompt, 6, "tokenswift", SAMPLING, NARROW).token_ids == expected
    assert {shape[2] for shape in calls} >= {39, 1, 8}


def test_every_familys_passes_use_what_was_found(as_on_cuda, counted, prompt, family):
    model_type, model = family
    dec = Decoder(model)
    expected = dec.generate(prompt, 6, "ar", SAMPLING).token_ids
    owners = {sys.modules[type(module).__module__] for module in model.modules()}
    before = [getattr(owner, "apply_rotary_pos_emb", None) for owner in owners]
    fixed = with_recorder(dec, Unrecorded())
    assert fixed.generate(prompt, 6, "ar", SAMPLING).token_ids == expected
    # The first generation has tested the kernel, too.
    counted.clear()
    assert fixed.generate(prompt, 6, "ar", SAMPLING).token_ids == expected
    used = any(shape[1] == 4 for shape in counted)
    assert used == (model_type not in NONE | PAIRS | PARTIAL)
    assert [getattr(owner, "apply_rotary_pos_emb", None) for owner in owners] == before


def test_the_function_is_the_modelling_files_own_but_for_passes(as_on_cuda, prompt):
    dec = with_recorder(rotary_decoder(), TapeRecorder())
    seen, failing = [], []

    def look(*_):
        seen.append(modeling_llama.apply_rotary_pos_emb)
        if failing:
            raise RuntimeError("layer failed")

    dec.target.model.model.layers[1].register_forward_pre_hook(look)
    for _ in dec.stream(prompt, 20, "tokenswift", SAMPLING, NARROW):
        assert modeling_llama.apply_rotary_pos_emb is OWN
    failing.append(True)
    with pytest.raises(RuntimeError, match="layer failed"):
        dec.generate(prompt, 20, "ar", SAMPLING)
    assert modeling_llama.apply_rotary_pos_emb is OWN
    assert len(seen) > 2 and all(isinstance(function, FusedRotary) and function.original is OWN for function in seen)


def test_two_decoders_of_a_family_take_turns_and_one_runs_inside_the_other(as_on_cuda, prompt):
    expected = [rotary_decoder().generate(prompt[k:], 20, "ar", SAMPLING).token_ids for k in range(2)]
    first, second = (with_recorder(rotary_decoder(), TapeRecorder()) for _ in range(2))
    streams = [dec.stream(prompt[k:], 20, "tokenswift", SAMPLING, NARROW) for k, dec in enumerate((first, second))]
    found = [[], []]
    while any(len(tokens) < 20 for tokens in found):
        for stream, tokens in zip(streams, found, strict=True):
            tokens += [token for chunk in islice(stream, 1) for token in chunk.token_ids]
            assert modeling_llama.apply_rotary_pos_emb is OWN
    assert found == expected

    outer, inner = (with_recorder(rotary_decoder(), Unrecorded()) for _ in range(2))
    seen = []

    def run_inside(*_):
        before = modeling_llama.apply_rotary_pos_emb
        tokens = inner.generate(prompt[1:], 20, "ar", SAMPLING).token_ids
        seen.append((before, modeling_llama.apply_rotary_pos_emb, tokens))

    hook = outer.target.model.model.layers[0].register_forward_pre_hook(run_inside)
    assert outer.generate(prompt, 2, "ar", SAMPLING).token_ids == expected[0][:2]
    hook.remove()
    for before, after, tokens in seen:
        assert isinstance(before, FusedRotary) and before.original is OWN and after is before
        assert tokens == expected[1]
    assert seen and modeling_llama.apply_rotary_pos_emb is OWN
    # What it found inside of the other is the function itself.
    assert inner.target.backend.rotary[modeling_llama].original is OWN


def test_a_function_of_the_users_own_stays(as_on_cuda, counted, prompt, monkeypatch):
    dec = with_recorder(rotary_decoder(), Unrecorded())
    found = fused_rotary(dec.target.model.modules(), torch.device("cpu"))
    users = []

    def own(*arguments):
        users.append(arguments)
        return OWN(*arguments)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", own)
    with rotary_replaced(found):
        assert modeling_llama.apply_rotary_pos_emb is own
    # The next generation looks again, and finds it to be the same function.
    dec.generate(prompt, 5, "ar", SAMPLING)
    assert users and counted and modeling_llama.apply_rotary_pos_emb is own


def test_without_recorded_passes_nothing_is_replaced(counted, prompt):
    dec = rotary_decoder()
    dec.generate(prompt, 5, "tokenswift", SAMPLING, NARROW)
    assert not counted


@pytest.mark.gpu
def test_offsets_may_pass_31_bits():
    buffer = torch.randn(2**32 + 2**28, device=DEVICE, dtype=torch.bfloat16)
    q = buffer.as_strided((1, 3, 2, 64), (1, 2**31 - 64, 64, 1))
    k = buffer.as_strided((1, 2, 2, 64), (1, 128, 2**32 + 64, 1))
    cos, sin = angles(1, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    exact = OWN(q.double(), k.double(), cos.double(), sin.double())
    for actual, expected in zip(rotate(q, k, cos, sin), exact, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.gpu
def test_a_captured_graph_follows_what_it_is_given():
    q, k = transposed(1, 24, 32, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    cos, sin = angles(1, 24, 128, device=DEVICE, dtype=torch.bfloat16)
    recorder = CudaGraphs(DEVICE)
    recordable, _ = recorder.warm_up(lambda: rotate(q, k, cos, sin))
    assert recordable
    replay, outputs = recorder.record(lambda: rotate(q, k, cos, sin))
    for _ in range(2):
        for tensor in (q, k, cos, sin):
            tensor.normal_()
        replay()
        torch.testing.assert_close(outputs, eager_rotation(q, k, cos, sin), rtol=2**-7, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 24, 300])
def test_a_pass_on_cuda_launches_one_kernel_per_layer(tokens):
    """Recorded or not, wherever Triton works; and its hidden states are those of the original."""
    model, hidden = tiny_llama(torch.bfloat16).cuda(), []
    for fused in (True, False):
        target = Target(model)
        if not fused:
            target.backend.rotary = {}
        cache = FullCache(1000)
        with torch.inference_mode(), target.patched():
            for run in range(3):
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    states = target.draft([7] * tokens, 0, cache)
                    target.wait()
                launched = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
                assert launched.count("rotate") == (2 if fused else 0), run
        hidden.append(states.float())
    torch.testing.assert_close(*hidden, rtol=0.1, atol=0.1 * hidden[1].abs().max().item())
