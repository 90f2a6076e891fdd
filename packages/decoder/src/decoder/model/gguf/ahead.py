"""Matrices of a file, packed while Python imports what runs them.

Importing transformers keeps one processor busy for two seconds and more, and packing a file of half a gigabyte another
one for about as long.
"""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch

from decoder.backends.native.quantised import QuantisedMatrix, WeightFormat, weight_formats
from decoder.model.gguf import is_gguf, open_checked
from decoder.model.gguf.file import GgufFile

# Matrices that nearly all models have in the file's order; others are packed when it is known.
_IN_ORDER = re.compile(r"(token_embd|output|blk\.\d+\.(attn_v|attn_output|ffn_gate|ffn_up|ffn_down))\.weight")


@contextmanager
def packing_ahead(source: str | os.PathLike) -> Iterator[None]:
    """A block at whose beginning a thread starts to pack the matrices of a GGUF file, for `GgufFile.packing`.

    Nothing is told of a file that cannot be read: whoever loads the model does so.
    """
    file = None
    with suppress(OSError, ValueError):
        file = open_checked(source) if is_gguf(source) and not torch.cuda.is_available() else None
    if file is None:
        yield
        return
    with ThreadPoolExecutor(1, "packing") as thread:
        for name, tensor in file.tensors.items():
            kind = weight_formats().get(tensor.format.number)
            if kind is not None and len(tensor.shape) == 2 and _IN_ORDER.fullmatch(name):
                file.packing[name] = thread.submit(_packed, file, name, kind)
        try:
            yield
        finally:
            file.stop_packing()


def _packed(file: GgufFile, name: str, kind: WeightFormat) -> QuantisedMatrix:
    matrix = QuantisedMatrix(kind, file.tensors[name].blocks, threads=1)
    file.release(name)
    _ = matrix.finite  # which is asked for when it is taken
    return matrix
