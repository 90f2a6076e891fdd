"""The Triton kernels of `backends.cuda.bitwise_split_kv`; imported only where they run."""

import triton
import triton.language as tl


# What differs from pass to pass or from cache to cache must not make Triton compile another version, which could sum in
# another order.
@triton.jit(do_not_specialize=["slots_of_key", "slots_of_value", "splits", "new"])
def attend_prefix(
    query,
    key,
    value,
    tails,
    partial,
    log_sums,
    slots_of_key,
    slots_of_value,
    splits,
    new,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One block of query rows of one KV head over one split of its prefix. Grid: (row blocks, splits, KV heads).

    Row r is query head r % GROUP of new token r // GROUP. Of the rows whose prefix reaches into the split, ``partial``
    [T, HEADS, splits, VALUE_DIM] takes the softmax over it, and ``log_sums`` [T, HEADS, splits] the binary logarithm of
    its sum.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    split, head = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_tokens = rows // GROUP
    inside = rows < new * GROUP
    starts = tl.load(tails + row_tokens * (1 + COLUMNS), mask=inside, other=0).to(tl.int32)
    first = split * SPLIT
    end = tl.minimum(first + SPLIT, tl.max(starts, 0))
    if first < end:
        dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
        row_slots = row_tokens.to(tl.int64) * HEADS + head * GROUP + rows % GROUP
        key += head.to(tl.int64) * slots_of_key * DIM
        value += head.to(tl.int64) * slots_of_value * VALUE_DIM
        loaded = inside[:, None] & (dims < DIM)[None, :]
        q = tl.load(query + row_slots[:, None] * DIM + dims[None, :], mask=loaded, other=0.0)
        sums: tl.constexpr = tl.float64 if q.dtype == tl.float64 else tl.float32
        scale = tl.full((), SCALE, sums)
        accumulator = tl.zeros((BLOCK_M, BLOCK_V), sums)
        highest = tl.full((BLOCK_M,), float("-inf"), sums)
        total = tl.zeros((BLOCK_M,), sums)
        for start in tl.range(first, end, BLOCK_N, num_stages=STAGES):
            columns = start + tl.arange(0, BLOCK_N)
            slots = columns.to(tl.int64)
            # Zeros stand for what is not loaded. It might be NaN, which a weight of zero would not remove.
            keys = key + slots[:, None] * DIM + dims[None, :]
            k = tl.load(keys, mask=(columns < end)[:, None] & (dims < DIM)[None, :], other=0.0)
            # A row's keys end at its own T(p): what lies behind adds exactly nothing, also where other rows see it.
            seen = columns[None, :] < starts[:, None]
            scores = tl.where(seen, tl.zeros((BLOCK_M, BLOCK_N), sums), float("-inf"))
            scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee", out_dtype=sums)
            higher = tl.maximum(highest, tl.max(scores, 1) * scale)
            # The highest score of a row that has seen no key yet is -inf, and -inf - -inf would be NaN.
            offset = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores * scale - offset[:, None])
            decay = tl.exp2(highest - offset)
            total = total * decay + tl.sum(weights, 1)
            values = value + slots[:, None] * VALUE_DIM + value_dims[None, :]
            v = tl.load(values, mask=(columns < end)[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)
            accumulator = tl.dot(
                weights.to(v.dtype), v, accumulator * decay[:, None], input_precision="ieee", out_dtype=sums
            )
            highest = higher
        taking_part = inside & (starts > first)
        divisor = tl.where(total > 0, total, 1.0)
        parts = row_slots * splits + split
        tl.store(
            partial + parts[:, None] * VALUE_DIM + value_dims[None, :],
            accumulator * (1.0 / divisor)[:, None],
            mask=taking_part[:, None] & (value_dims < VALUE_DIM)[None, :],
        )
        tl.store(log_sums + parts, highest + tl.log2(divisor), mask=taking_part)


@triton.jit(do_not_specialize=["slots_of_key", "slots_of_value", "splits"])
def attend_tail(
    query,
    key,
    value,
    tails,
    partial,
    log_sums,
    slots_of_key,
    slots_of_value,
    splits,
    output,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One query head of one new token: its prefix's splits merged in their order, then its tail. Grid: (T, HEADS).

    One online softmax goes over both: the state (sum of values, highest score, sum of weights) takes ``BLOCK_S`` splits
    at a time, then all of the tail.
    """
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    tail = tails + tl.program_id(0).to(tl.int64) * (1 + COLUMNS)
    head = (tl.program_id(1) // (HEADS // KV_HEADS)).to(tl.int64)
    key += head * slots_of_key * DIM
    value += head * slots_of_value * VALUE_DIM
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    sums: tl.constexpr = log_sums.dtype.element_ty
    q = tl.load(query + row * DIM + dims, mask=dims < DIM, other=0.0).to(sums)
    scale = tl.full((), SCALE, sums)
    accumulator = tl.zeros((BLOCK_V,), sums)
    highest = tl.full((), float("-inf"), sums)
    total = tl.full((), 0.0, sums)

    taking_part = tl.cdiv(tl.load(tail).to(tl.int32), SPLIT)
    for first in range(0, taking_part, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        there = split < taking_part
        parts = row * splits + split
        log_sum = tl.load(log_sums + parts, mask=there, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(log_sum, 0))
        weights = tl.exp2(log_sum - higher)
        decay = tl.exp2(highest - higher)
        part = partial + parts[:, None] * VALUE_DIM + value_dims[None, :]
        values = tl.load(part, mask=there[:, None] & (value_dims < VALUE_DIM)[None, :], other=0.0)
        total = total * decay + tl.sum(weights, 0)
        accumulator = accumulator * decay + tl.sum(values * weights[:, None], 0)
        highest = higher

    columns = tl.arange(0, BLOCK_C)
    slots = tl.load(tail + 1 + columns, mask=columns < COLUMNS, other=-1)
    seen = slots >= 0
    k = tl.load(key + slots[:, None] * DIM + dims[None, :], mask=seen[:, None] & (dims < DIM)[None, :], other=0.0)
    scores = tl.where(seen, tl.sum(k.to(sums) * q[None, :], 1) * scale, float("-inf"))
    # Every token sees the first key of its tail, so the highest score is a number from here on.
    higher = tl.maximum(highest, tl.max(scores, 0))
    weights = tl.exp2(scores - higher)
    decay = tl.exp2(highest - higher)
    loaded = seen[:, None] & (value_dims < VALUE_DIM)[None, :]
    v = tl.load(value + slots[:, None] * VALUE_DIM + value_dims[None, :], mask=loaded, other=0.0)
    total = total * decay + tl.sum(weights, 0)
    accumulator = accumulator * decay + tl.sum(v.to(sums) * weights[:, None], 0)
    result = (accumulator / total).to(output.dtype.element_ty)
    tl.store(output + row * VALUE_DIM + value_dims, result, mask=value_dims < VALUE_DIM)
