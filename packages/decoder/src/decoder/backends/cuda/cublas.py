"""How cuBLAS may round inside of a product: settings of the whole process, which passes bit for bit depend on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_reductions() -> Iterator[None]:
    """A block in which sums of products in half precision are kept in float32 throughout, whatever the user has set.

    A recorded pass keeps what was set when it was recorded, so passes that are run must not follow what is set later.
    TF32 cannot be treated like this: two interfaces set it, and neither can restore what the other has set.
    """
    matmul = torch.backends.cuda.matmul
    before = {
        f"allow_{dtype}_reduced_precision_reduction": tuple(
            getattr(matmul, f"allow_{dtype}_reduced_precision_reduction{of}") for of in ("", "_split_k")
        )
        for dtype in ("bf16", "fp16")
    }
    accumulation = matmul.allow_fp16_accumulation
    try:
        for name, (_, split_k) in before.items():
            setattr(matmul, name, (False, split_k))
        matmul.allow_fp16_accumulation = False
        yield
    finally:
        for name, settings in before.items():
            setattr(matmul, name, settings)
        matmul.allow_fp16_accumulation = accumulation
