"""The tests of the fast paths: each compares one with the plain function, on the device and at the model's own shapes.

They are for the registry in `fast_paths`, and return in a few words what is wrong, or None. Inputs are random.
Tolerances allow for rounding only; the errors of a wrong function are about as large as its results.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from decoder.backends import attention
from decoder.backends.attention import AttentionShape
from decoder.backends.cuda import rotary, split_kv
from decoder.backends.native import norms
from decoder.backends.native.native_attention import NewTokens, native_attention
from decoder.backends.native.packed_linear import DraftRows
from decoder.backends.native.quantised import QuantisedLinear
from decoder.draft_heads import DraftHead

ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2**-6, torch.bfloat16: 2**-5}
_ALLOWED_FOR_DRAFTS = 2**-3  # whose weights are packed in 8 bits
"""Largest allowed error, relative to the largest number of a result."""

# New tokens of a pass, and whether they are a tree: a draft, a tree, a wide tree, a chunk of a prompt. Each has its own
# tile sizes and is compiled when it first runs.
_PASSES = ((1, False), (8, True), (64, True), (300, False))
_LENGTHS = (0, 77, 1500)  # cached tokens: none, less than a block, many blocks
_SPARE = 33  # slots behind them, which hold NaN
_FEW_OUTPUTS = 256
_ROWS = (1, 2, 16)  # rows of the inputs of packed products


def difference(actual: torch.Tensor, expected: torch.Tensor, allowed: float) -> str | None:
    """In what ``actual`` differs from ``expected`` by more than ``allowed``, in words; NaN always differs."""
    if actual.shape != expected.shape:
        return f"it gives numbers of shape {tuple(actual.shape)} in place of {tuple(expected.shape)}"
    actual, expected = actual.double(), expected.double()
    largest = expected.abs().max()
    error = (actual - expected).abs().max()
    if error <= allowed * largest:
        return None
    return f"its numbers differ from the plain function's by up to {float(error):.2g} (these are up to {largest:.2g})"


@torch.inference_mode()
def split_kv_fault(shape: AttentionShape, device: torch.device) -> str | None:
    """Test the split-KV kernel against one softmax in float64, for several widths and lengths."""
    random = _random(shape.dtype, device)
    slots = max(_LENGTHS) + max(new for new, _ in _PASSES) + _SPARE
    whole = [random(1, shape.kv_heads, slots, size) for size in (shape.dim, shape.value_dim)]
    scaling = shape.dim**-0.5
    for new, tree in _PASSES:
        query = random(1, new, shape.heads, shape.dim).transpose(1, 2)
        mask = _tree_mask(new, device) if tree else None
        for length in _LENGTHS:
            end = length + new
            key, value = (buffer.clone() for buffer in whole)
            key[:, :, end:] = value[:, :, end:] = torch.nan
            on_device = torch.tensor([length], device=device)
            actual = split_kv.split_kv_attention(query, key, value, on_device, mask, scaling)
            blocked = torch.ones(new, new, dtype=torch.bool, device=device).triu(1) if mask is None else ~mask
            seen = key[:, :, :end].double(), value[:, :, :end].double()
            expected = attention._one_softmax(query.double(), *seen, blocked, scaling)
            fault = difference(actual, expected, ALLOWED[shape.dtype])
            if fault:
                return f"{fault} at {new} tokens behind {length}"
    return None


@torch.inference_mode()
def native_attention_fault(shape: AttentionShape) -> str | None:
    """Test the native library's attention against one softmax in float64, for several widths and lengths."""
    random, scaling = _random(shape.dtype, torch.device("cpu")), shape.dim**-0.5
    slots = max(_LENGTHS) + max(new for new, _ in _PASSES) + _SPARE
    whole = [random(1, shape.kv_heads, slots, size) for size in (shape.dim, shape.value_dim)]
    for new, tree in _PASSES:
        heads = random(new, shape.heads + shape.kv_heads, shape.dim)
        mask = _tree_mask(new, heads.device) if tree else None
        blocked = torch.ones(new, new, dtype=torch.bool).triu(1) if mask is None else ~mask
        for length in _LENGTHS:
            end = length + new
            key, value = (buffer.clone() for buffer in whole)
            key[:, :, end:] = value[:, :, end:] = torch.nan
            given = [key], [value], [NewTokens(length, new, mask)], scaling
            actual = native_attention(heads, shape.heads, *given).view(new, shape.heads, -1)
            query = heads[:, : shape.heads].transpose(0, 1)[None].double()
            seen = key[:, :, :end].double(), value[:, :, :end].double()
            expected = attention._one_softmax(query, *seen, blocked, scaling)
            fault = difference(actual, expected[0].transpose(0, 1), ALLOWED[shape.dtype])
            if fault:
                return f"{fault} at {new} tokens behind {length}"
    return None


@torch.inference_mode()
def rotary_fault(shape: AttentionShape, device: torch.device) -> str | None:
    """Test the rotary kernel against its formula in float64; angles may be of a wider dtype than queries and keys."""
    random = _random(shape.dtype, device)
    dim = shape.dim // 2 * 2
    for tokens in (1, 24):
        q, k = (random(1, tokens, heads, dim).transpose(1, 2) for heads in (shape.heads, shape.kv_heads))
        for dtype in {shape.dtype, torch.float32}:
            cos, sin = (_random(dtype, device)(1, tokens, dim) for _ in range(2))
            for actual, x in zip(rotary.rotate(q, k, cos, sin), (q, k), strict=True):
                fault = difference(actual, _rotated(x, cos, sin), ALLOWED[shape.dtype])
                if fault:
                    return f"{fault} at {tokens} tokens"
    return None


@torch.inference_mode()
def rms_norm_fault(sizes: frozenset[tuple[int, torch.dtype]], device: torch.device) -> str | None:
    """Test `norms.FusedNorm` against its formula in float64, for each size and dtype of a model's norms."""
    for size, dtype in sizes:
        random = _random(dtype, device)
        x, weight, eps = 3 * random(1, 5, size), random(size), 1e-6
        wide = x.double()
        expected = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
        fault = difference(norms.FusedNorm(weight, eps)(x), expected, ALLOWED[dtype])
        if fault:
            return f"{fault} at size {size} in {_name(dtype)}"
    return None


@torch.inference_mode()
# Under autocast the plain function would compute in another dtype.
@torch.autocast("cpu", enabled=False)
def packed_fault(packed: Mapping[nn.Module, Callable]) -> str | None:
    """Test packed layers against the modules that they replace, one of each shape."""
    tested = set()
    for owner, modules in _by_owner(packed).items():
        kind = packed_shapes(modules), owner.kind
        if kind in tested:
            continue
        tested.add(kind)
        for rows in _ROWS:
            inputs = _inputs(modules[0], rows)
            for module in modules:
                # The class's forward and not the module, since the user's hooks must not see the test input.
                expected, actual = type(module).forward(module, *inputs), packed[module](*inputs)
                if isinstance(module, QuantisedLinear):
                    # Its forward is the library's, too: some outputs are compared with unpacked weights.
                    few = torch.arange(min(module.out_features, _FEW_OUTPUTS))
                    expected = inputs[0].float() @ module.rows(few).T
                    expected, actual = (
                        expected if module.bias is None else expected + module.bias[few],
                        actual[..., few],
                    )
                for_drafts = isinstance(module, DraftHead | DraftRows)
                allowed = max(ALLOWED[inputs[0].dtype], _ALLOWED_FOR_DRAFTS if for_drafts else 0)
                fault = difference(actual, expected, allowed)
                if fault:
                    return f"{fault} in a {type(owner).__name__} of {rows} rows"
    return None


def packed_shapes(modules: Mapping[nn.Module, Callable] | list[nn.Module]) -> tuple:
    """The types, shapes and dtypes of ``modules``; modules for which they are equal need only one test."""
    return tuple(
        (type(module).__name__, *((tuple(tensor.shape), tensor.dtype) for tensor in module.parameters()))
        for module in modules
    )


def packed_kinds(packed: Mapping[nn.Module, Callable]) -> frozenset:
    """What tells packed layers apart: their types, shapes and dtypes, and the libraries that compute their products."""
    return frozenset((packed_shapes(modules), owner.kind) for owner, modules in _by_owner(packed).items())


def _by_owner(packed: Mapping[nn.Module, Callable]) -> dict[Any, list[nn.Module]]:
    """Layers by the product that computes them: of layers that share one, the first that is called computes for all."""
    owners: dict[Any, list[nn.Module]] = {}
    for module, forward in packed.items():
        bound = forward.func if isinstance(forward, partial) else forward
        owners.setdefault(getattr(bound, "__self__", bound), []).append(module)
    return owners


def _inputs(module: nn.Module, rows: int) -> tuple:
    if isinstance(module, DraftHead):
        dtype, size = module.input_norm.weight.dtype, len(module.input_norm.weight)
        random = _random(dtype, module.input_norm.weight.device)
        conditioned = module.linear.in_features == 2 * size
        return random(rows, size), random(rows, size) if conditioned else None
    weight = module.get_parameter("weight")
    # PyTorch's kernel for codes rounds its inputs.
    dtype = weight.dtype if weight.is_floating_point() else torch.bfloat16
    return (_random(dtype, weight.device)(1, rows, module.in_features),)


def _random(dtype: torch.dtype, device: torch.device) -> Callable[..., torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32, generator=generator).to(dtype)

    return random


def _tree_mask(new: int, device: torch.device) -> torch.Tensor:
    """The mask of a binary tree, in which each token sees itself and its ancestors."""
    mask = torch.eye(new, dtype=torch.bool)
    for node in range(1, new):
        mask[node] |= mask[(node - 1) // 2]
    return mask.to(device)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    (first, second), (cos1, cos2), (sin1, sin2) = (
        part.double().chunk(2, -1) for part in (x, cos[:, None], sin[:, None])
    )
    return torch.cat((first * cos1 - second * sin1, second * cos2 + first * sin2), -1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
