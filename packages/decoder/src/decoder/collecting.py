"""Python's search for unreachable cycles, put off while many objects are made that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """A block, or a decorated function, in which Python does not look for cycles.

    While PyTorch and transformers are imported and a model is loaded, it would look again and again through hundreds of
    thousands of objects, none of which goes, for a tenth of all the processor time until the first token.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
