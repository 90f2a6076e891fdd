"""Linear layers for a handful of rows on a CPU, where a step has one and a verification 2 to 64 of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

_MOST_ROWS = 64
_FEWEST_ROWS = 4


def few_rows_linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """``module(x)`` with the weights as the left operand: [out, in] @ [in, rows].

    The matrix library then shares the rows of the weights among its threads; the other way round it would share the
    few rows of ``x``, and one thread would read all weights alone (measured with 2 threads and 8 rows: half the time).
    A single row would be a matrix-vector product, which PyTorch runs on one thread; as four equal rows it is shared.
    With one thread there is nothing to share.
    """
    rows = x.shape[:-1].numel()
    if rows > _MOST_ROWS or torch.get_num_threads() == 1:
        return F.linear(x, module.weight, module.bias)
    flat = x.reshape(rows, -1)
    if rows == 1:
        flat = flat.expand(_FEWEST_ROWS, -1)
    product = (module.weight @ flat.T).T[:rows]
    if module.bias is not None:
        product = product + module.bias
    # Contiguous, as models may count on of a linear layer.
    return product.contiguous().view(*x.shape[:-1], -1)


@contextmanager
def few_rows(modules: list[nn.Linear]) -> Iterator[None]:
    """`few_rows_linear` in place of the forward of each module, until the end of the block; blocks nest.

    A module whose forward has been replaced already, by an outer block or by the user, keeps that one.
    """
    plain = [module for module in modules if "forward" not in module.__dict__]
    for module in plain:
        module.__dict__["forward"] = partial(few_rows_linear, module)
    try:
        yield
    finally:
        for module in plain:
            del module.__dict__["forward"]
