"""Split-KV attention (flash-decoding) with Triton, over a cache whose length is read on the device."""

import math
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

# Merging more splits than this would take longer than they save.
_MOST_SPLITS = 256

# The device that the emulation of the kernels on a CPU assumes; even a short sequence is then split.
_EMULATED_MULTIPROCESSORS = 8
_EMULATED_SHARED_MEMORY = 2**20


class Device(NamedTuple):
    """The properties of a device that launches depend on; shared memory is in bytes per thread block."""

    multiprocessors: int
    shared_memory: int
    hopper: bool


class LaunchShape(NamedTuple):
    """How a launch is divided: rows and keys of a tile, warps and pipeline stages of a program, splits of the keys."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int

    def shared_memory(self, dim: int, value_dim: int, dtype: torch.dtype, hopper: bool) -> int:
        """How many bytes of shared memory a program needs at most."""
        width, value_width = padded(dim), padded(value_dim)
        # Hopper's products read the stage that is next to be overwritten.
        buffered = self.stages if hopper and self.block_m >= 64 else max(1, self.stages - 1)
        fetched = buffered * self.block_n * (width + value_width)
        held = self.block_m * (max(width, value_width) + self.block_n)
        return (fetched + held) * dtype.itemsize + 2048


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def padded(dim: int) -> int:
    """A head size as the kernels use it: rounded up to a power of two, and to at least 16 for tensor cores."""
    return max(16, next_power_of_2(dim))


def unavailable(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on ``device``, or None; whether they then give right numbers must be tested."""
    if device.type != "cuda":
        return "for CUDA only"
    return "Triton is not installed" if find_spec("triton") is None else None


@cache
def device_properties(device: torch.device) -> Device:
    """The properties of a CUDA device, or those assumed for a CPU that emulates the kernels (Triton's interpreter)."""
    if device.type == "cpu":
        return Device(_EMULATED_MULTIPROCESSORS, _EMULATED_SHARED_MEMORY, hopper=False)
    from triton.runtime import driver

    found = driver.active.utils.get_device_properties(device.index)
    major, _ = torch.cuda.get_device_capability(device)
    return Device(found["multiprocessor_count"], found["max_shared_mem"], hopper=major == 9)


@cache
def launch_shape(rows: int, pairs: int, dim: int, value_dim: int, dtype: torch.dtype, device: Device) -> LaunchShape:
    """The launch for ``rows`` query rows for each of ``pairs`` (batch x KV heads).

    Tiles are as large as the compiler keeps in registers (`tests/decoder/compile_kernels.py` shows what it makes of
    them), with eight warps to a multiprocessor, for which registers always suffice. The splits fill all multiprocessors
    once, since a second, partly filled round would take as long as the first. Neither their number nor their borders
    depend on the cache's capacity, so the bits of a result do not, either. Over a short sequence some splits have no
    keys; they end at once, and the merging kernel gives them no weight.
    """
    width = max(padded(dim), padded(value_dim))
    warps, stages = 4, 2
    if dtype == torch.float64:
        block_m, block_n = 16, 16
        stages = 2 if width <= 128 else 1
    elif dtype == torch.float32:
        # In full precision there are no tensor cores, which would compute 16 rows at the cost of one.
        block_m, block_n = 4 if rows <= 4 else 16, 32 if width <= 128 else 16
        stages = 3 if block_m == 4 else 2
        warps = 8 if block_m == 16 and width > 128 else 4
    else:
        # On Hopper two warp groups share the keys they fetch; elsewhere registers do not hold as many rows.
        block_m = min(max(16, next_power_of_2(rows)), 128 if device.hopper else 64)
        # With few rows memory is the bottleneck: longer tiles, and more of them in flight.
        block_n = min(128 if block_m <= 32 else 64, 8192 // width)
        stages = 4 if block_m == 16 else 3
        warps = 8 if block_m * width >= 128 * 128 else 4
    programs = math.ceil(rows / block_m) * pairs
    splits = device.multiprocessors * 8 // warps // programs
    splits = max(1, min(splits, _MOST_SPLITS))
    shape = LaunchShape(block_m, block_n, warps, stages, splits)
    while shape.stages > 1 and shape.shared_memory(dim, value_dim, dtype, device.hopper) > device.shared_memory:
        shape = shape._replace(stages=shape.stages - 1)
    return shape


def split_kv_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_length: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Attention of T new tokens over L cached ones and themselves, where L is read on the device.

    The launch depends on shapes, dtypes and the device alone and not on L, so a CUDA graph of it stays right while the
    sequence grows. Query heads are packed per KV head, and no key or value is replicated. The keys are split among
    programs. Each computes the softmax over its part, and a second kernel merges these by their sums (flash-decoding).
    Sums are in float32 (float64 for float64), and float32 products are not rounded to TF32. The first call with a head
    size, dtype or width of tree compiles, which is not possible while a graph is being captured.

    Args:
        query: queries [B, H, T, D], in float64, float32, bfloat16 or float16, the dtype of key and value.
        key: the cache's keys [B, G, C, D], where G divides H and C is at least L + T. Those of the new tokens are at L
            to L + T already. What is behind them is never used and may be anything, NaN included.
        value: the cache's values [B, G, C, Dv], likewise.
        kv_length: L, one int64 on the device.
        mask: whether the new token of a row sees that of a column, bool [T, T] on the device; causal if None. All
            cached tokens are seen. A token that sees nothing at all gets zeros.
        scaling: the factor of the scores.

    Returns:
        Attention [B, H, T, Dv], laid out in memory as [B, T, H, Dv].
    """
    batch, heads, new, dim = query.shape
    groups, value_dim = key.shape[1], value.shape[3]
    if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    if mask is not None:
        mask = mask.contiguous().view(torch.uint8)
    group = heads // groups
    shape = launch_shape(new * group, batch * groups, dim, value_dim, query.dtype, device_properties(query.device))
    output = query.new_empty(batch, new, heads, value_dim)
    sums_dtype = torch.promote_types(torch.float32, query.dtype)
    if shape.splits > 1:
        partial = query.new_empty(shape.splits, *output.shape, dtype=sums_dtype)
        log_sums = query.new_empty(shape.splits, batch, new, heads, dtype=sums_dtype)
    else:
        partial, log_sums = output, None
    # Triton launches on the current device.
    with torch.cuda.device_of(query):
        _launch_attend(query, key, value, kv_length, mask, partial, log_sums, shape, scaling)
        if shape.splits > 1:
            _launch_merge(partial, log_sums, output)
    return output.transpose(1, 2)


def _launch_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_length: torch.Tensor,
    mask: torch.Tensor | None,
    partial: torch.Tensor,
    log_sums: torch.Tensor | None,
    shape: LaunchShape,
    scaling: float,
) -> None:
    """Launch the kernel that attends, each program to one split of the keys."""
    from decoder.backends.cuda import split_kv_triton as kernels

    batch, heads, new, dim = query.shape
    groups, value_dim = key.shape[1], value.shape[3]
    group = heads // groups
    kernels.attend_split[math.ceil(new * group / shape.block_m), shape.splits, batch * groups](
        query,
        key,
        value,
        kv_length,
        mask,
        partial,
        log_sums,
        new,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        # The kernels' exponentials are binary.
        SCALE=scaling * math.log2(math.e),
        KV_HEADS=groups,
        GROUP=group,
        DIM=dim,
        VALUE_DIM=value_dim,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_D=padded(dim),
        BLOCK_V=padded(value_dim),
        STAGES=shape.stages,
        num_warps=shape.warps,
    )


def _launch_merge(partial: torch.Tensor, log_sums: torch.Tensor, output: torch.Tensor) -> None:
    """Launch the kernel that merges the splits [splits, B, T, H, Dv] into the output [B, T, H, Dv]."""
    from decoder.backends.cuda import split_kv_triton as kernels

    splits, value_dim = len(partial), output.shape[3]
    rows = output.shape[:3].numel()
    block_s = next_power_of_2(splits)
    block_v = min(padded(value_dim), 4096 // block_s)
    kernels.merge_splits[rows, math.ceil(value_dim / block_v)](
        partial,
        log_sums,
        output,
        rows,
        splits,
        VALUE_DIM=value_dim,
        BLOCK_S=block_s,
        BLOCK_V=block_v,
        num_warps=4,
    )
