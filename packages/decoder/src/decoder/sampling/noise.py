"""Noise keyed by position: what makes every method draw the same tokens.

The Gumbel noise of token t at absolute position i is a pure function of (seed, i, t). Integers come from SplitMix64
(Steele, Lea and Flood, 2014) in wrapping 64-bit tensor arithmetic, so they are equal on every device: token t of
position i is output t + 1 of the generator whose state is the mixed key (seed, i).
"""

import torch

_BLOCK = 16  # positions
_CACHED = 2**16  # numbers

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _shift_right(z: torch.Tensor, bits: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Logical right shift of int64 tensors; torch's own shift is arithmetic and copies the sign bit."""
    return torch.bitwise_right_shift(z, bits, out=out).bitwise_and_(2 ** (64 - bits) - 1)


def mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64 tensors of any shape."""
    # In place, since these tensors may have an entry per position and token of the vocabulary.
    z, shifted = z.clone(), torch.empty_like(z)
    z ^= _shift_right(z, 30, shifted)
    z *= _MIX_1
    z ^= _shift_right(z, 27, shifted)
    z *= _MIX_2
    z ^= _shift_right(z, 31, shifted)
    return z


def random_bits(seed: int, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """64 random bits for each (position, token): int64 [positions, tokens] from two int64 vectors."""
    key = mix(mix(torch.full_like(positions, seed) + _GOLDEN) + (positions + 1) * _GOLDEN)
    return mix(key[:, None] + (token_ids + 1) * _GOLDEN)


def gumbel(seed: int, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64 [positions, tokens].

    The uniform is (2k + 1) / 2**53 with k of 52 bits: exact in float64, symmetric, never 0 or 1. log1p keeps the
    upper tail, which decides the draws, exact to the last bit.
    """
    bits = random_bits(seed, positions, token_ids)
    # 2k + 1 is what the upper 53 bits are with the last of them set.
    odd = _shift_right(bits, 11, bits).bitwise_or_(1)
    return odd.double().mul_(-(2.0**-53)).log1p_().neg_().log_().neg_()


class NoiseRows:
    """The noise of consecutive positions, for drafts and verifications alike, made once for each position.

    It is made for 16 positions at once, since that takes no more calls than one; on a CPU for as few as stay in its
    caches, for a large vocabulary position by position.
    """

    def __init__(self, seed: int, vocab_size: int, device: torch.device):
        self.seed, self._block = seed, _BLOCK
        if device.type == "cpu":
            self._block = min(_BLOCK, max(1, _CACHED // vocab_size))
        self.token_ids = torch.arange(vocab_size, device=device)
        self._made: dict[int, torch.Tensor] = {}  # by position, float64 [V]

    def rows(self, first: int, count: int, skip: int = 0) -> torch.Tensor:
        """The noise of ``count`` positions, float64 [count, V], the first of them ``skip`` behind ``first``.

        What was made of positions before ``first`` is forgotten.
        """
        self._made = {position: row for position, row in self._made.items() if position >= first}
        wanted = range(first + skip, first + skip + count)
        # A block begins at ``first``, so that it also serves requests for the positions that are skipped.
        for position in wanted if self._block == 1 else range(first, wanted.stop):
            if position not in self._made:
                positions = range(position, position + self._block)
                ids = torch.arange(positions.start, positions.stop, device=self.token_ids.device)
                self._made.update(zip(positions, gumbel(self.seed, ids, self.token_ids).unbind(), strict=True))
        rows = [self._made[position] for position in wanted]
        return rows[0][None] if count == 1 else torch.stack(rows)
