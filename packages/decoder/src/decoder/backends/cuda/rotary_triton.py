"""The Triton kernel of `rotary`; imported only where it runs, so that the library works without Triton."""

import triton
import triton.language as tl


@triton.jit
def _rotate_heads(
    x,
    rotated,
    cos,
    sin,
    heads,
    batch,
    token,
    batch_stride,
    head_stride,
    token_stride,
    rotated_batch_stride,
    rotated_head_stride,
    rotated_token_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rotate some heads of one token; ``cos`` and ``sin`` point to its angles."""
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HALF
    inside_heads = (heads < HEADS)[:, None] & inside[None, :]
    x += batch * batch_stride + token * token_stride
    rotated += batch * rotated_batch_stride + token * rotated_token_stride
    # Products with strides may need more than 31 bits.
    offsets = heads.to(tl.int64)[:, None] * head_stride + dims[None, :]
    rotated_offsets = heads.to(tl.int64)[:, None] * rotated_head_stride + dims[None, :]

    precise: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    first = tl.load(x + offsets, mask=inside_heads).to(precise)
    second = tl.load(x + offsets + HALF, mask=inside_heads).to(precise)
    first_cos = tl.load(cos + dims, mask=inside).to(precise)[None, :]
    second_cos = tl.load(cos + HALF + dims, mask=inside).to(precise)[None, :]
    first_sin = tl.load(sin + dims, mask=inside).to(precise)[None, :]
    second_sin = tl.load(sin + HALF + dims, mask=inside).to(precise)[None, :]
    numbers = rotated.dtype.element_ty
    tl.store(rotated + rotated_offsets, (first * first_cos - second * first_sin).to(numbers), mask=inside_heads)
    tl.store(
        rotated + rotated_offsets + HALF, (second * second_cos + first * second_sin).to(numbers), mask=inside_heads
    )


@triton.jit
def rotate(
    query,
    key,
    cos,
    sin,
    rotated_query,
    rotated_key,
    query_batch_stride,
    query_head_stride,
    query_token_stride,
    key_batch_stride,
    key_head_stride,
    key_token_stride,
    rotated_query_batch_stride,
    rotated_query_head_stride,
    rotated_query_token_stride,
    rotated_key_batch_stride,
    rotated_key_head_stride,
    rotated_key_token_stride,
    cos_batch_stride,
    cos_token_stride,
    sin_batch_stride,
    sin_token_stride,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``BLOCK_H`` heads of one token, of the queries or of the keys. Grid: (tokens, blocks of heads, batch).

    The blocks of keys come behind those of queries. ``HALF`` is half the head size.
    """
    token, block, batch = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    query_blocks: tl.constexpr = (QUERY_HEADS + BLOCK_H - 1) // BLOCK_H
    cos += batch * cos_batch_stride + token * cos_token_stride
    sin += batch * sin_batch_stride + token * sin_token_stride
    if block < query_blocks:
        _rotate_heads(
            query,
            rotated_query,
            cos,
            sin,
            block * BLOCK_H + tl.arange(0, BLOCK_H),
            batch,
            token,
            query_batch_stride,
            query_head_stride,
            query_token_stride,
            rotated_query_batch_stride,
            rotated_query_head_stride,
            rotated_query_token_stride,
            QUERY_HEADS,
            HALF,
            BLOCK_D,
        )
    else:
        _rotate_heads(
            key,
            rotated_key,
            cos,
            sin,
            (block - query_blocks) * BLOCK_H + tl.arange(0, BLOCK_H),
            batch,
            token,
            key_batch_stride,
            key_head_stride,
            key_token_stride,
            rotated_key_batch_stride,
            rotated_key_head_stride,
            rotated_key_token_stride,
            KEY_HEADS,
            HALF,
            BLOCK_D,
        )
