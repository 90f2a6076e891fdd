"""Attention to a long text's prefix, in which a row has the same bits whatever rows are beside it."""

from functools import reduce

import torch

BLOCK = 8192
"""Of a prefix of two blocks or more, whole blocks of so many keys are read by products, the rest by flash attention."""
LARGEST = 4 * BLOCK
"""Keys that a product reads at most.

oneDNN prepares, and keeps, each shape of a product: a megabyte each, so there must be few of them along a text.
"""
_SCORES = 2**24  # that are held at a time, so that a prompt's many rows take little memory
_PARTS = 32  # of a product's keys, whose sums are rounded to bfloat16 each

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

Attended = tuple[torch.Tensor, torch.Tensor]
"""Outputs [G, rows, Dv] and the log-sum-exps of their scores [G, rows, 1], both float32 or wider."""


def attend_prefix(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    near: torch.Tensor,
    products: bool,
    multiple: int,
) -> Attended:
    """Attention of queries [G, rows, D] to all of the keys [G, L, D] and values [G, L, Dv].

    Args:
        near: a score of each row that is about as high as its highest one, [G, rows, 1]. Products leave it out of
            theirs, so that the ones that count are small numbers, and rounded little.
        products: whether whole blocks are read by products. Where a processor multiplies bfloat16 these are as fast as
            memory gives them the keys: up to twice as fast as flash attention.
        multiple: of which the number of rows in a product is one.
    """
    length = key.shape[1]
    whole = length - length % BLOCK if products and length >= 2 * BLOCK else 0
    attended: list[Attended] = []
    if whole:
        most = _SCORES // (len(rows) * whole)
        parts = rows.split(max(multiple, most - most % multiple), 1)
        of_parts = zip(parts, near.split(parts[0].shape[1], 1), strict=True)
        found = [_by_products(part, its, key[:, :whole], value[:, :whole], scaling) for part, its in of_parts]
        outputs, log_sums = zip(*found, strict=True)
        attended.append((torch.cat(outputs, 1), torch.cat(log_sums, 1)))
    if whole < length:
        output, log_sum = _flash(rows[None], key[None, :, whole:], value[None, :, whole:], scale=scaling)
        attended.append((output[0].to(log_sum.dtype), log_sum[0, :, :, None]))
    if len(attended) == 1:
        return attended[0]
    (output, log_sum), (more, more_sum) = attended
    # One operation after the other. `torch.logaddexp` gives other numbers at the end of a tensor than before it, and a
    # product and a sum at once may, too.
    highest = torch.maximum(log_sum, more_sum)
    both = highest + ((log_sum - highest).exp() + (more_sum - highest).exp()).log()
    return ((log_sum - both).exp() * output).add_((more_sum - both).exp() * more), both


def _by_products(
    rows: torch.Tensor, near: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> Attended:
    """`attend_prefix` to whole blocks."""
    near = near.to(rows.dtype)
    heads, count, length = len(rows), rows.shape[1], key.shape[1]
    spans = [slice(first, min(first + LARGEST, length)) for first in range(0, length, LARGEST)]
    # Head by head: behind a text its cache has room, and of such views a product of all heads makes copies.
    scores = [rows.new_empty(heads, count, span.stop - span.start) for span in spans]
    for span, of_span in zip(spans, scores, strict=True):
        of_span.copy_(near.neg().expand_as(of_span))
        for head, out in enumerate(of_span):
            torch.addmm(out, rows[head], key[head, span].mT, alpha=scaling, out=out)
    highest = reduce(torch.maximum, (of_span.amax(2, keepdim=True) for of_span in scores))
    output = rows.new_zeros(heads, count, value.shape[2], dtype=torch.float32)
    total = rows.new_zeros(heads, count, 1, dtype=torch.float32)
    for span, of_span in zip(spans, scores, strict=True):
        # What is summed are the weights as they are rounded for the product.
        weights = of_span.sub_(highest).exp_()
        total += weights.view(heads, count, _PARTS, -1).sum(3).sum(2, keepdim=True, dtype=torch.float32)
        for head in range(heads):
            output[head] += torch.mm(weights[head], value[head, span])
    return output / total, near.float() + highest.float() + total.log()
