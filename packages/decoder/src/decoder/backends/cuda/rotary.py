"""Rotary position embedding in one Triton kernel, where transformers' function launches some ten in every layer."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import nn

from decoder.backends.cuda.split_kv import next_power_of_2
from decoder.backends.faults import holds
from decoder.backends.forwards import under_autocast

_NAME = "apply_rotary_pos_emb"

# Relative errors above those of the original's roundings in each dtype and below those of another rotation. float64 is
# left out, since it serves as the reference in tests and stays with the original.
TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}
_TYPICAL_SIZES = (64, 128)

# How many numbers of each half of a head a program of one warp rotates: in half precision 16 bytes per thread.
_TILE = 256


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by the angles of their positions, in one launch.

    The first half of a head is rotated against its second. With x1, x2 the halves of a head and cos1, cos2, sin1, sin2
    the halves of its cosines and sines, the halves of the result are x1 * cos1 - x2 * sin1 and x2 * cos2 + x1 * sin2,
    computed in float32 (float64 for float64) and rounded once. The host does not wait, and the launch depends on shapes
    and dtypes alone. The first call with a head size, dtype or number of heads compiles, which is not possible while a
    graph is being captured.

    Args:
        q: queries [B, H, T, D]; D is even and has stride 1.
        k: keys [B, G, T, D], of the same dtype; D has stride 1.
        cos, sin: cosines and sines [B, T, D], or [1, T, D] for all of the batch; D has stride 1.

    Returns:
        The rotated q and k, in the dtype and memory order of q and k, without gaps.
    """
    from decoder.backends.cuda import rotary_triton as kernels

    batch, heads, tokens, dim = q.shape
    groups = k.shape[1]
    rotated_q, rotated_k = torch.empty_like(q), torch.empty_like(k)
    block_d = next_power_of_2(dim // 2)
    block_h = min(max(1, _TILE // block_d), next_power_of_2(max(heads, groups)))
    # Triton launches on the current device.
    with torch.cuda.device_of(q):
        kernels.rotate[tokens, math.ceil(heads / block_h) + math.ceil(groups / block_h), batch](
            q,
            k,
            cos,
            sin,
            rotated_q,
            rotated_k,
            *q.stride()[:3],
            *k.stride()[:3],
            *rotated_q.stride()[:3],
            *rotated_k.stride()[:3],
            *(0 if len(cos) == 1 else cos.stride(0), cos.stride(1)),
            *(0 if len(sin) == 1 else sin.stride(0), sin.stride(1)),
            QUERY_HEADS=heads,
            KEY_HEADS=groups,
            HALF=dim // 2,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=1,
        )
    return rotated_q, rotated_k


class FusedRotary:
    """Replaces a modelling file's function: `rotate` for inputs for which both were found equal, else the original.

    Args:
        original: the modelling file's function, (q, k, cos, sin, ...) -> rotated q and k.
        device: the device on which they were compared.
        dtypes: pairs of dtypes, that of q and k and that of cos and sin, for which they were found equal.
    """

    def __init__(self, original: Callable, device: torch.device, dtypes: set[tuple[torch.dtype, torch.dtype]]):
        self.original, self.device, self.dtypes = original, device, dtypes

    def __call__(self, *args, **named):
        return rotate(*args) if not named and self._known(*args) else self.original(*args, **named)

    def _known(self, *args) -> bool:
        if not (len(args) == 4 and all(isinstance(argument, torch.Tensor) for argument in args)):
            return False
        q, k, cos, sin = args
        if not (q.ndim == k.ndim == 4 and cos.ndim == sin.ndim == 3) or torch.is_grad_enabled() or under_autocast():
            return False
        batch, _, tokens, dim = q.shape
        return (
            q.device == k.device == cos.device == sin.device == self.device
            and q.dtype == k.dtype
            and cos.dtype == sin.dtype
            and (q.dtype, cos.dtype) in self.dtypes
            and k.shape == (batch, k.shape[1], tokens, dim)
            and cos.shape == sin.shape
            and cos.shape in ((1, tokens, dim), (batch, tokens, dim))
            and dim % 2 == 0
            and q.stride(-1) == k.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
            # For overlapping heads the result would be laid out differently.
            and min(*q.stride()[:3], *k.stride()[:3]) >= dim
        )


def fused_rotary(modules: Iterable[nn.Module], device: torch.device) -> dict[ModuleType, FusedRotary]:
    """Replacements for `apply_rotary_pos_emb` in the Python modules that define ``modules``.

    Transformers' attention layers call the function of that name in their modelling file. It is replaced if it does the
    same as `rotate` to random queries and keys, in the dtypes of ``modules`` and with their ``head_dim``, for cosines
    and sines whose halves differ, in the same dtype or in float32. Other functions (which rotate neighbours in pairs,
    or use the angles of one half for both) stay, and so does float64. Rounding differs: the kernel rounds once.
    """
    modules = list(modules)
    dtypes = {parameter.dtype for module in modules for parameter in module.parameters(recurse=False)}
    kinds = {(dtype, other) for dtype in dtypes & TOLERANCE.keys() for other in (dtype, torch.float32)}
    sizes: dict[ModuleType, set[int]] = {}
    for module in modules:
        owner = sys.modules.get(type(module).__module__)
        if hasattr(owner, _NAME):
            size = getattr(module, "head_dim", None)
            sizes.setdefault(owner, set()).update([size] if isinstance(size, int) else [])
    found = {}
    for owner, dims in sizes.items():
        original = getattr(owner, _NAME)
        if isinstance(original, FusedRotary):
            # Another target of the same family is running and has replaced the function.
            original = original.original
        same = {kind for kind in kinds if all(_same(original, device, *kind, dim) for dim in dims or _TYPICAL_SIZES)}
        if same:
            found[owner] = FusedRotary(original, device, same)
    return found


@torch.inference_mode()
def _same(original: Callable, device: torch.device, dtype: torch.dtype, angle_dtype: torch.dtype, dim: int) -> bool:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32, generator=generator)

    q, k = (random(1, 5, heads, dim).to(dtype).transpose(1, 2) for heads in (3, 2))
    cos, sin = (random(1, 5, dim).to(angle_dtype) for _ in range(2))

    def same() -> bool:
        rotated_q, rotated_k = original(q, k, cos, sin)
        return rotated_q.dtype == rotated_k.dtype == dtype and all(
            actual.shape == expected.shape
            and bool((actual - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max())
            for actual, expected in zip(rotate(q, k, cos, sin), (rotated_q, rotated_k), strict=True)
        )

    return holds(same)


@contextmanager
def rotary_replaced(found: Mapping[ModuleType, FusedRotary]) -> Iterator[None]:
    """Put the replacements into their Python modules until the end of the block; blocks can be nested.

    A function that an outer block or the user has already replaced stays.
    """
    plain = [(owner, fused) for owner, fused in found.items() if getattr(owner, _NAME) is fused.original]
    for owner, fused in plain:
        setattr(owner, _NAME, fused)
    try:
        yield
    finally:
        for owner, fused in plain:
            setattr(owner, _NAME, fused.original)
