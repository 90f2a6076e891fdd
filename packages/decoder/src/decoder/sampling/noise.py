"""Noise keyed by position: what makes every method draw the same tokens.

The Gumbel noise of token t at absolute position i is a pure function of (seed, i, t). Integers come from SplitMix64
(Steele, Lea and Flood, 2014) in wrapping 64-bit tensor arithmetic, so they are equal on every device: token t of
position i is output t + 1 of the generator whose state is the mixed key (seed, i).
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch

from decoder.sampling.filters import highest_of

_CACHED = 2**16  # numbers of noise that are computed together, so that they stay in a processor's caches
_TOGETHER = 2**13  # tokens whose upper bits are computed together, for the same reason
_LARGE = 2**15  # tokens; below, computing all the noise takes less time than finding out who needs it

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_WORD = 2**64 - 1

_LEAST = -math.log(53 * math.log(2))  # the least noise there is, of the greatest uniform, 1 - 2**-53
# Scores within so many nats of the best one are taken with their noise. With fewer nats there are fewer of these, and
# more tokens whose noise is high enough to make up for it.
_NEAR = 11.0
# Words below this one may have noise of more than _NEAR + _LEAST. The last step of `mix` leaves their upper 31 bits as
# they are, so it can be left out; two units of these bits are given away to roundings.
_LUCKY = ((int(-math.expm1(-math.exp(-_NEAR - _LEAST)) * 2**64) >> 33) + 2) << 33


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
        _gumbel(out.copy_(_shift_right(bits, 11, bits).bitwise_or_(1)))
    return noise


def _gumbel(odd: torch.Tensor) -> torch.Tensor:
    """The noise of uniforms 2k + 1 in units of 2**-53, in place."""
    return odd.mul_(-(2.0**-53)).log1p_().neg_().log_().neg_()


def highest_with_noise(scores: np.ndarray, seed: int, position: int) -> tuple[int, float]:
    """The token whose score plus noise is the highest at a position, the first of equal ones, and that sum.

    The same as the argmax of ``scores + gumbel(...)``; for a large vocabulary in a fourth of the time, unless most
    scores are nearly equal. Noise is never below `_LEAST`, so a token whose score is more than `_NEAR` below the best
    one needs noise above ``_NEAR + _LEAST``. One in 1,600 has it, as its upper bits tell. Logarithms are taken for
    these alone and for those that are near.

    Args:
        scores: float64 [V], on the host; -inf for tokens that cannot be drawn. The best one is finite and
            below 1e9, so that rounding a sum changes it by far less than what `_LUCKY` gives away.
    """
    key = _key(seed, position)
    candidates = np.flatnonzero(scores >= scores.max() - _NEAR)
    if len(candidates) < np.count_nonzero(scores > -math.inf):
        candidates = np.concatenate([candidates, *_lucky(key, len(scores))])
    words = _counters(candidates)
    words += key
    _mix_words(words)
    noise = _gumbel(torch.from_numpy(((words >> np.uint64(11)) | np.uint64(1)).astype(np.float64)))
    sums = scores[candidates] + noise.numpy()
    best = sums.max()
    return int(candidates[sums == best].min()), float(best)


def _lucky(key: np.uint64, vocab_size: int) -> Iterator[np.ndarray]:
    """The tokens with noise above ``_NEAR + _LEAST``, and perhaps a few more."""
    base = _first_counters()
    for start in range(0, vocab_size, len(base)):
        words = base[: vocab_size - start] + np.uint64(int(key) + start * _GOLDEN & _WORD)
        _mix_upper_bits(words)
        yield start + np.flatnonzero(words < np.uint64(_LUCKY))


def _key(seed: int, position: int) -> np.uint64:
    """The mixed key (seed, position)."""
    words = np.array([seed + _GOLDEN & _WORD], dtype=np.uint64)
    _mix_words(words)
    words += np.uint64((position + 1) * _GOLDEN & _WORD)
    _mix_words(words)
    return words[0]


def _counters(token_ids: np.ndarray) -> np.ndarray:
    """What each token adds to the key of a position, uint64."""
    return (token_ids + 1).astype(np.uint64) * np.uint64(_GOLDEN & _WORD)


@lru_cache(maxsize=1)
def _first_counters() -> np.ndarray:
    return _counters(np.arange(_TOGETHER))


def _mix_words(words: np.ndarray) -> None:
    """`mix` in place on uint64 on the host, where NumPy takes half the time: its words have no sign to shift around."""
    _mix_upper_bits(words)
    words ^= words >> np.uint64(31)


def _mix_upper_bits(words: np.ndarray) -> None:
    """`_mix_words` but for its last step, which changes the lower 33 bits alone."""
    shifted = words >> np.uint64(30)
    words ^= shifted
    words *= np.uint64(_MIX_1 & _WORD)
    np.right_shift(words, np.uint64(27), out=shifted)
    words ^= shifted
    words *= np.uint64(_MIX_2 & _WORD)


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

    def highest(self, scores: torch.Tensor, position: int) -> tuple[int, float]:
        """The token whose score [V] plus noise is the highest, the first of equal ones, and that sum; on the host."""
        values = scores.numpy(force=True)
        if self._sparing and not self._all.has(position, position + 1) and math.isfinite(values.max()):
            return highest_with_noise(values, self._all.seed, position)
        return highest_of((scores + self.rows(position, 1)[0]).numpy(force=True))
