"""Where attention that gives a token the same bits whatever else is in its pass cuts a text, on CUDA.

A sum in floating point depends on its order, so every order there follows from a token's position alone. The keys that
a token at position p sees are cut at T(p) = STRIDE * floor(max(0, p - DEPTH) / STRIDE):

- its prefix, the keys before T(p), is committed text whatever tree the token stands in, since no tree is deeper than
  DEPTH;
- its tail, the keys from T(p) to p, has its ancestors in the columns where plain decoding has them, COLUMNS in all.
"""

from collections.abc import Sequence

import torch

from decoder.backends.base import DEEPEST

DEPTH = DEEPEST
STRIDE = 32
COLUMNS = DEPTH + STRIDE
"""The number of keys in a tail. Those behind the token count too, although it does not see them."""


def tail_slots(length: int, depths: Sequence[int], mask: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Where the new tokens of a pass find their keys: int64 [rows, 1 + COLUMNS].

    A row has T(p), below which its token sees every slot of the cache, and then the slots of its tail in the order of
    the text; -1 stands for keys that it does not see. Rows behind those of the tokens are padding, which sees itself.

    Args:
        length: L, cached tokens; the new tokens' entries stand in the slots from there on.
        depths: how deep each new token stands below the first, [T]; at most DEPTH, unless there is no mask.
        mask: which new token sees which, bool [T, T]; None is plain causal.
        rows: how many rows the pass has, at least T.
    """
    new = len(depths)
    slots = torch.full((rows, 1 + COLUMNS), -1)
    slots[:, 0] = 0
    slots[:, 1] = torch.arange(length, length + rows)
    positions = length + torch.tensor(depths)[:, None]
    starts = STRIDE * ((positions - DEPTH).clamp_min(0) // STRIDE)
    in_text = starts + torch.arange(COLUMNS)
    own = in_text
    if mask is not None:
        # Each token's ancestors and itself, in the order of the text.
        tokens, seen = mask.nonzero(as_tuple=True)
        ancestors = torch.zeros(new, new, dtype=torch.long)
        ancestors[tokens, mask.cumsum(1)[tokens, seen] - 1] = seen
        above = length + ancestors.gather(1, (in_text - length).clamp(0, new - 1))
        own = torch.where(in_text < length, in_text, above)
    slots[:new, :1] = starts
    slots[:new, 1:] = own.masked_fill(in_text > positions, -1)
    return slots
