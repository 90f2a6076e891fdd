"""The Triton kernels of `split_kv`; imported only where they run, so that the library works without Triton."""

import triton
import triton.language as tl


@triton.jit
def _attend(
    query,
    accumulator,
    highest,
    total,
    key,
    value,
    mask,
    first,
    last,
    length,
    end,
    row_tokens,
    new,
    key_stride,
    value_stride,
    SCALE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over the key blocks ``first`` to ``last``; if not ``MASKED``, every row sees all of their keys."""
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    key_tile = tl.arange(0, BLOCK_N)[:, None] * key_stride + dims[None, :]
    value_tile = tl.arange(0, BLOCK_N)[:, None] * value_stride + value_dims[None, :]
    for block in tl.range(first, last, num_stages=STAGES):
        start = tl.cast(block, tl.int64) * BLOCK_N
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        keys = key + start * key_stride + key_tile
        values = value + start * value_stride + value_tile
        # Zeros stand for what is not loaded. It might be NaN, which a weight of zero would not remove.
        if MASKED:
            k = tl.load(keys, mask=(columns < end)[:, None] & (dims < DIM)[None, :], other=0.0)
        elif DIM == BLOCK_D:
            k = tl.load(keys)
        else:
            k = tl.load(keys, mask=(dims < DIM)[None, :], other=0.0)
        scores = tl.zeros((query.shape[0], BLOCK_N), highest.dtype)
        if MASKED:
            # Column c is new token c - length; those of the prefix are seen by all.
            among_new = columns - length
            if mask is None:
                seen = among_new[None, :] <= row_tokens[:, None]
            else:
                # Outside the mask, the prefix alone is seen.
                listed = (row_tokens < new)[:, None] & ((among_new >= 0) & (among_new < new))[None, :]
                prefix = tl.broadcast_to((among_new < 0)[None, :], listed.shape).to(tl.uint8)
                seen = tl.load(mask + row_tokens[:, None] * new + among_new[None, :], mask=listed, other=prefix) != 0
            # The product starts from the mask. If it was applied afterwards, the scores would get the layout in which
            # the mask is loaded, and registers would spill.
            scores = tl.where(seen, scores, float("-inf"))
        scores = tl.dot(query, tl.trans(k), scores, input_precision="ieee", out_dtype=scores.dtype)
        scale = tl.full((), SCALE, scores.dtype)
        higher = tl.maximum(highest, tl.max(scores, 1) * scale)
        # The highest score of a row that has seen no key yet is -inf, and -inf - -inf would be NaN.
        offset = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weights = tl.exp2(scores * scale - offset[:, None])
        decay = tl.exp2(highest - offset)
        total = total * decay + tl.sum(weights, 1)
        if MASKED:
            v = tl.load(values, mask=(columns < end)[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)
        elif VALUE_DIM == BLOCK_V:
            v = tl.load(values)
        else:
            v = tl.load(values, mask=(value_dims < VALUE_DIM)[None, :], other=0.0)
        accumulator = tl.dot(
            weights.to(v.dtype), v, accumulator * decay[:, None], input_precision="ieee", out_dtype=accumulator.dtype
        )
        highest = higher
    return accumulator, highest, total


# Numbers of new tokens and of splits change along a sequence, and must not make Triton compile anew.
@triton.jit(do_not_specialize=["new"], do_not_specialize_on_alignment=["kv_length", "mask"])
def attend_split(
    query,
    key,
    value,
    kv_length,
    mask,
    output,
    log_sums,
    new,
    query_batch_stride,
    query_head_stride,
    query_token_stride,
    key_batch_stride,
    key_head_stride,
    key_stride,
    value_batch_stride,
    value_head_stride,
    value_stride,
    SCALE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One block of query rows of one KV head over one split of its keys.

    Row r is query head r % GROUP of new token r // GROUP. Grid: (row blocks, splits, batch x KV heads).

    With one split, ``output`` is the result [B, T, G x GROUP, Dv] and ``log_sums`` None. With more, they take each
    split's softmax, [splits, B, T, G x GROUP, Dv], and the binary logarithm of its sum, [splits, B, T, G x GROUP].
    """
    row_block, split, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, batches = tl.num_programs(1), tl.num_programs(2) // KV_HEADS
    batch, head = pair // KV_HEADS, pair % KV_HEADS
    length = tl.load(kv_length).to(tl.int32)
    first_row = row_block * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    row_tokens = rows // GROUP
    row_heads = head * GROUP + rows % GROUP
    inside = rows < new * GROUP

    # Below ``plain``, every row of the block sees every key; from ``end`` on, none sees any.
    if mask is None:
        plain = length + first_row // GROUP + 1
        end = length + tl.minimum((first_row + BLOCK_M - 1) // GROUP + 1, new)
    else:
        plain = length
        end = length + new
    blocks = tl.cdiv(end, BLOCK_N)
    first = split * blocks // splits
    last = (split + 1) * blocks // splits
    turn = tl.maximum(first, tl.minimum(last, plain // BLOCK_N))

    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    query += batch.to(tl.int64) * query_batch_stride
    key += batch.to(tl.int64) * key_batch_stride + head.to(tl.int64) * key_head_stride
    value += batch.to(tl.int64) * value_batch_stride + head.to(tl.int64) * value_head_stride
    offsets = row_heads.to(tl.int64) * query_head_stride + row_tokens.to(tl.int64) * query_token_stride
    q = tl.load(query + offsets[:, None] + dims[None, :], mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)

    sums: tl.constexpr = tl.float64 if q.dtype == tl.float64 else tl.float32
    accumulator = tl.zeros((BLOCK_M, BLOCK_V), sums)
    highest = tl.full((BLOCK_M,), float("-inf"), sums)
    total = tl.zeros((BLOCK_M,), sums)
    for masked in tl.static_range(2):
        accumulator, highest, total = _attend(
            q,
            accumulator,
            highest,
            total,
            key,
            value,
            mask,
            turn if masked else first,
            last if masked else turn,
            length,
            end,
            row_tokens,
            new,
            key_stride,
            value_stride,
            SCALE,
            DIM,
            VALUE_DIM,
            BLOCK_N,
            BLOCK_D,
            BLOCK_V,
            masked == 1,
            1 if masked else STAGES,  # one or two blocks: a pipeline would only take shared memory
        )

    # Rows that have seen no key, and splits without keys, become zero.
    divisor = tl.where(total > 0, total, 1.0)
    result = accumulator * (1.0 / divisor)[:, None]
    slots = ((split * batches + batch).to(tl.int64) * new + row_tokens) * (KV_HEADS * GROUP) + row_heads
    tl.store(
        output + slots[:, None] * VALUE_DIM + value_dims[None, :],
        result.to(output.dtype.element_ty),
        mask=inside[:, None] & (value_dims < VALUE_DIM)[None, :],
    )
    if log_sums is not None:
        tl.store(log_sums + slots, highest + tl.log2(divisor), mask=inside)


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_splits(
    partial,
    log_sums,
    output,
    rows,
    splits,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Merge the splits of one row, weighted by their sums. Grid: (rows, parts of the value)."""
    row = tl.program_id(0)
    split = tl.arange(0, BLOCK_S)
    value_dims = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    slots = split.to(tl.int64) * rows + row
    log_sum = tl.load(log_sums + slots, mask=split < splits, other=float("-inf"))
    highest = tl.max(log_sum, 0)
    weights = tl.exp2(log_sum - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    tile = slots[:, None] * VALUE_DIM + value_dims[None, :]
    parts = tl.load(partial + tile, mask=(split < splits)[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    offsets = row.to(tl.int64) * VALUE_DIM + value_dims
    tl.store(output + offsets, result.to(output.dtype.element_ty), mask=value_dims < VALUE_DIM)
