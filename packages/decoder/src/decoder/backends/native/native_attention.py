"""Attention by the native library: all sequences of a pass in one call, each token over the keys that it sees."""

from collections.abc import Sequence
from ctypes import byref
from typing import Any, NamedTuple

import torch

from decoder.backends.attention import Entries, Scores
from decoder.backends.base import AttentionShape
from decoder.backends.native import library as native
from decoder.backends.native.structures import MOST_CODED_DIM, MOST_DIM, QUERY_HEADS_HELD, Attention, SequenceKV
from decoder.cache.form import Codes
from decoder.cache.layout import FULL

_DTYPES = (torch.float32, torch.bfloat16)


class NewTokens(NamedTuple):
    """One sequence's new tokens.

    Attributes:
        length: the cached tokens' number.
        tokens: how many they are, t.
        mask: which of them sees which, bool [t, t], contiguous, parents before children; None is plain causal.
        position: of the first one; a cache may hold fewer tokens than come before it.
    """

    length: int
    tokens: int
    mask: torch.Tensor | None
    position: int = 0

    @staticmethod
    def attend(
        sequences: "Sequence[NewTokens]", query: torch.Tensor, keys: Entries, values: Entries, scores: Scores
    ) -> torch.Tensor:
        """See `Attending`."""
        heads = query[0].transpose(0, 1)
        if heads.stride()[1:] != (heads.shape[2], 1):
            heads = heads.contiguous()
        output = native_attention(heads, heads.shape[1], keys, values, sequences, scores)
        return output.view(1, *heads.shape[:2], -1)


def unavailable(shape: AttentionShape, device: torch.device) -> str | None:
    """Why the library does not attend with heads of this shape; None if it does."""
    if device.type != "cpu":
        return "for a CPU only"
    if shape.dtype not in _DTYPES:
        return "for float32 and bfloat16"
    try:
        native.library()
    except native.NativeUnavailable as error:
        return str(error)
    if max(shape.dim, shape.value_dim) > MOST_DIM:
        return f"for heads of at most {MOST_DIM} numbers"
    most = QUERY_HEADS_HELD
    return f"for at most {most} query heads to a KV head" if shape.heads > most * shape.kv_heads else None


def native_attention(
    heads: torch.Tensor,
    query_heads: int,
    keys: Sequence[torch.Tensor | Codes],
    values: Sequence[torch.Tensor | Codes],
    new: Sequence[NewTokens],
    scores: Scores,
) -> torch.Tensor:
    """Attention of the new tokens of several sequences, which stand behind each other, each over its own sequence.

    A token's numbers depend on its query and on the keys and values that it sees, in the order of the sequence, and on
    nothing else that is in the call.

    Args:
        heads: [T, H or more, D], the first H of each token its queries; rows of all heads stand side by side.
        query_heads: H.
        keys, values: by sequence [1, G, slots, D] and [1, G, slots, Dv], the new ones behind the cached ones.
            In layers that do not attend to the whole sequence those are of the positions just before the first new one.
            Codes of int8, for which D is a multiple of four, are read as whole numbers; queries and weights are rounded
            to 16 bits for them.
        new: by sequence its new tokens.

    Returns:
        [T, H x Dv], in the queries' dtype.

    Raises:
        MemoryError: there is no memory for partial results.
    """
    given = heads.dtype
    dtype = given if given in _DTYPES else torch.float32
    heads = heads.to(dtype)
    entries = [[_readable(one, dtype) for one in each] for each in (keys, values)]
    sequences = (SequenceKV * len(keys))()
    for sequence, (key, key_scales), (value, value_scales), own in zip(sequences, *entries, new, strict=True):
        _, sequence.key_head, sequence.key_slot, _ = key.stride()
        _, sequence.value_head, sequence.value_slot, _ = value.stride()
        sequence.keys, sequence.values = key.data_ptr(), value.data_ptr()
        if key_scales is not None and value_scales is not None:
            sequence.key_scales, sequence.value_scales = key_scales.data_ptr(), value_scales.data_ptr()
            _, sequence.scale_head, _, _ = key_scales.stride()
        sequence.length, sequence.count = (own.length if scores.kind == FULL else own.position), own.tokens
        sequence.first = 0 if scores.kind == FULL else own.position - key.shape[2] + own.tokens
        sequence.mask = None if own.mask is None else own.mask.data_ptr()
    tokens, _, dim = heads.shape
    (key, _), (value, _) = (each[0] for each in entries)
    value_dim = value.shape[3]
    if max(dim, value_dim) > MOST_DIM:
        raise ValueError(
            f"heads of at most {MOST_DIM} numbers can be attended to, and these have {max(dim, value_dim)}"
        )
    if dim > MOST_CODED_DIM and any(isinstance(one, Codes) for one in keys):
        raise ValueError(f"codes are attended to in heads of at most {MOST_CODED_DIM} numbers, and these have {dim}")
    out = heads.new_empty(tokens, query_heads * value_dim)
    asked, _held = settings(scores)
    call = Attention(
        sequences,
        heads.data_ptr(),
        out.data_ptr(),
        heads.stride(0),
        query_heads,
        key.shape[1],
        dim,
        value_dim,
        is_bf16=heads.dtype == torch.bfloat16,
        **asked,
    )
    if native.library().attend(byref(call), len(keys), native.threads()):
        raise MemoryError("no memory for the partial results of attention")
    return out.to(given)


def settings(scores: Scores) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What the library's `Attention` says of scores, whose fields it calls as `Scores` does; and what it then reads."""
    step, back = scores.kind.reach
    held = {
        name: own.detach().float().contiguous() for name, own in scores.beside.items() if isinstance(own, torch.Tensor)
    }
    beside = scores.beside | {name: own.data_ptr() for name, own in held.items()}
    return dict(scaling=scores.scaling, step=step, back=back, **beside), list(held.values())


def not_known(scores: Scores) -> str | None:
    """In words, what a layer asks for that the library does not know."""
    unknown = scores.beside.keys() - {name for name, *_ in Attention._fields_}
    return f"for layers without {min(unknown)}" if unknown else None


def _readable(entries: torch.Tensor | Codes, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys or values with the numbers of each side by side, and their scales if they have any."""
    numbers, scales = entries if isinstance(entries, Codes) else (entries.to(dtype), None)
    return numbers if numbers.stride(3) == 1 else numbers.contiguous(), scales
