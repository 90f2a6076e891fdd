"""Split-KV attention that gives a token the same bits whatever else is in its pass.

A token at position p sees its prefix, the keys before T(p), and its tail (`tails`). The prefix is cut into
splits of SPLIT keys from the first one on, whatever the sequence's length, the cache's capacity and the number of
tokens in the pass. A program sums one split for a tile of rows of fixed shape, in which a row's keys from its T(p) on
have no weight; splits behind T(p) are left out. A second kernel, with a program for each token and head, merges a row's
splits in the order of the sequence and goes on with its tail, whose keys it gathers from the slots that `tail_slots`
gives.

A sum's order also follows from how the compiler lays out a tile. So one loop serves all blocks of keys, those that some
rows do not see as well, and no argument that differs between passes makes Triton compile another version.
"""

import math

import torch

from decoder.backends.cuda.split_kv import LaunchShape, device_properties, launch_shape, next_power_of_2, padded
from decoder.backends.cuda.tails import COLUMNS

SPLIT = 1024
"""Keys of a split. Shorter ones keep more of a GPU busy over a short sequence; longer ones leave less to be merged."""

_ROWS = 64  # query rows of a tile in half precision, whatever the number of rows
_TOKENS = 64  # that are attended to at once; splits of more would take much memory
_MERGED = 16  # splits that are merged at once
_TAIL_WARPS = 8  # of a program that holds a whole tail


def bitwise_split_kv_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tails: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention of T new tokens of one sequence, each over its prefix and its tail.

    The launch depends on shapes, dtypes and the device alone, so a CUDA graph of it stays right while the sequence
    grows. Precision and the first call are as in `split_kv.split_kv_attention`, except that weights of the tail are not
    rounded.

    Args:
        query: queries [1, H, T, D], in float64, float32, bfloat16 or float16, the dtype of key and value.
        key: the cache's keys [1, G, C, D], where G divides H. The pairs of the new tokens are in it already. What no
            token sees may be anything, NaN included.
        value: the cache's values [1, G, C, Dv], likewise.
        tails: `tails.tail_slots` of the T tokens, int64 [T, 1 + COLUMNS] on the device. Each sees a key.
        scaling: the factor of the scores.

    Returns:
        Attention [1, H, T, Dv], laid out in memory as [1, T, H, Dv].
    """
    _, heads, new, dim = query.shape
    groups, slots, value_dim = key.shape[1], key.shape[2], value.shape[3]
    # [T, H, D], with strides that do not follow from T.
    query = query[0].transpose(0, 1).contiguous()
    (key, slots_of_key), (value, slots_of_value) = _rows_in_a_row(key), _rows_in_a_row(value)
    shape = launch_shape(_ROWS, groups, dim, value_dim, query.dtype, device_properties(query.device))
    splits = max(1, math.ceil(slots / SPLIT))
    sums_dtype = torch.promote_types(torch.float32, query.dtype)
    output = query.new_empty(new, heads, value_dim)
    partial = query.new_empty(min(new, _TOKENS), heads, splits, value_dim, dtype=sums_dtype)
    log_sums = query.new_empty(partial.shape[:3], dtype=sums_dtype)
    # The kernels' exponentials are binary.
    scale = scaling * math.log2(math.e)
    sizes = dict(HEADS=heads, KV_HEADS=groups, DIM=dim, VALUE_DIM=value_dim, SPLIT=SPLIT, COLUMNS=COLUMNS)
    # Triton launches on the current device.
    with torch.cuda.device_of(query):
        for part in zip(*(whole.split(_TOKENS) for whole in (query, tails, output)), strict=True):
            own_query, own_tails, own_output = part
            pairs = key, value, own_tails, partial, log_sums, slots_of_key, slots_of_value, splits
            _launch_prefix(own_query, pairs, shape, scale, sizes)
            _launch_tail(own_query, pairs, own_output, scale, sizes)
    return output[None].transpose(1, 2)


def _rows_in_a_row(pairs: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Pairs [1, G, C, D] of which each head's lie next to each other, and how many slots lie between two heads'."""
    dim = pairs.shape[3]
    if pairs.stride(3) != 1 or pairs.stride(2) != dim or pairs.stride(1) % dim:
        pairs = pairs.contiguous()
    return pairs, pairs.stride(1) // dim


def _launch_prefix(query: torch.Tensor, pairs: tuple, shape: LaunchShape, scale: float, sizes: dict) -> None:
    from decoder.backends.cuda import bitwise_split_kv_triton as kernels

    per_head = sizes["HEADS"] // sizes["KV_HEADS"]
    grid = math.ceil(len(query) * per_head / shape.block_m), pairs[-1], sizes["KV_HEADS"]
    kernels.attend_prefix[grid](
        query,
        *pairs,
        len(query),
        SCALE=scale,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_D=padded(sizes["DIM"]),
        BLOCK_V=padded(sizes["VALUE_DIM"]),
        STAGES=shape.stages,
        num_warps=shape.warps,
        **sizes,
    )


def _launch_tail(query: torch.Tensor, pairs: tuple, output: torch.Tensor, scale: float, sizes: dict) -> None:
    from decoder.backends.cuda import bitwise_split_kv_triton as kernels

    kernels.attend_tail[len(query), sizes["HEADS"]](
        query,
        *pairs,
        output,
        SCALE=scale,
        BLOCK_S=_MERGED,
        BLOCK_C=next_power_of_2(COLUMNS),
        BLOCK_D=padded(sizes["DIM"]),
        BLOCK_V=padded(sizes["VALUE_DIM"]),
        num_warps=_TAIL_WARPS,
        **sizes,
    )
