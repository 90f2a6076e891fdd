"""Noise keyed by position: what makes every method draw the same tokens.

The Gumbel noise of token t at absolute position i is a pure function of (seed, i, t). Integers come from SplitMix64
(Steele, Lea and Flood, 2014) in wrapping 64-bit tensor arithmetic, so they are equal on every device: token t of
position i is output t + 1 of the generator whose state is the mixed key (seed, i).
"""

import torch

_CACHED = 2**16  # numbers of noise that are computed together, so that they stay in a processor's caches
_LARGE = 2**15  # tokens; below, computing all the noise takes less time than finding out who needs it

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
    noise = torch.empty(len(positions), len(token_ids), dtype=torch.float64, device=token_ids.device)
    # On a CPU for as few positions at a time as stay in its caches.
    size = len(positions) if token_ids.device.type != "cpu" else max(1, _CACHED // len(token_ids))
    for some, out in zip(positions.split(size), noise.split(size), strict=True):
        bits = random_bits(seed, some, token_ids)
        # 2k + 1 is what the upper 53 bits are with the last of them set.
        out.copy_(_shift_right(bits, 11, bits).bitwise_or_(1)).mul_(-(2.0**-53)).log1p_().neg_().log_().neg_()
    return noise


class _Rows:
    """The noise of some tokens at consecutive positions, computed some ``block`` at a time."""

    def __init__(self, seed: int, token_ids: torch.Tensor, block: int):
        self.seed, self.block, self.token_ids = seed, block, token_ids
        self._first = 0
        self._rows = torch.empty(0, len(token_ids), dtype=torch.float64, device=token_ids.device)

    def has(self, first: int, end: int) -> bool:
        """Whether the noise of these positions has been computed."""
        return self._first <= first and end <= self._first + len(self._rows)

    def of(self, first: int, count: int, skip: int) -> torch.Tensor:
        """As `NoiseRows.rows`."""
        end = first + skip + count
        if not self.has(first, end):
            positions = torch.arange(first, end + self.block, device=self.token_ids.device)
            self._first, self._rows = first, gumbel(self.seed, positions, self.token_ids)
        return self._rows[first + skip - self._first : end - self._first]


class NoiseRows:
    """The noise of consecutive positions, for drafts and verifications alike; computed some ``block`` at a time.

    On a CPU, noise of a large vocabulary is computed only for those tokens that need it.
    """

    def __init__(self, seed: int, vocab_size: int, device: torch.device, block: int = 16):
        self._all = _Rows(seed, torch.arange(vocab_size, device=device), block)
        self._some: _Rows | None = None  # of the tokens that were asked for last
        self._sparing = device.type == "cpu" and vocab_size >= _LARGE

    def rows(self, first: int, count: int, skip: int = 0, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """The noise of ``count`` positions, float64 [count, V], the first of them ``skip`` behind ``first``.

        New noise is computed from ``first`` on, so that it also serves requests for the positions that are skipped.

        Args:
            token_ids: where given, of which tokens alone, int64 [v]. What was computed for them serves the next call
                with the same tensor.
        """
        if token_ids is None:
            return self._all.of(first, count, skip)
        if not self._sparing or self._all.has(first + skip, first + skip + count):
            return self._all.of(first, count, skip).index_select(1, token_ids)
        if self._some is None or self._some.token_ids is not token_ids:
            self._some = _Rows(self._all.seed, token_ids, self._all.block)
        return self._some.of(first, count, skip)
