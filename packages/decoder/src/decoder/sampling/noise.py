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

_CACHED = 2**16  # numbers
_TOGETHER = 2**13  # tokens
_LARGE = 2**15  # tokens

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_WORD = 2**64 - 1

_LEAST = -math.log(53 * math.log(2))  # the least noise there is, of the greatest uniform, 1 - 2**-53
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

    The same as the argmax of ``scores + gumbel(...)``, in a fourth of the time for a large vocabulary. Noise is never
    below `_LEAST`, so a token whose score is more than `_NEAR` below the best one needs noise above ``_NEAR + _LEAST``.
    One in 1,600 has it, as its upper bits tell. Logarithms are taken for these alone and for those that are near.

    Args:
        scores: float64 [V], on the host; -inf for tokens that cannot be drawn. The best one is finite.
    """
    key = _key(seed, position)
    candidates = np.flatnonzero(scores >= scores.max() - _NEAR)
    if len(candidates) < np.count_nonzero(scores > -math.inf):
        candidates = np.concatenate([candidates, *_lucky(key, len(scores))])
    words = _counters(candidates)
    words += np.uint64(key)
    _mix_unfinished(words)
    words ^= words >> np.uint64(31)
    noise = _gumbel(torch.from_numpy(((words >> np.uint64(11)) | np.uint64(1)).astype(np.float64)))
    sums = scores[candidates] + noise.numpy()
    best = sums.max()
    return int(candidates[sums == best].min()), float(best)


def _lucky(key: int, vocab_size: int) -> Iterator[np.ndarray]:
    """The tokens with noise above ``_NEAR + _LEAST``, and perhaps a few more."""
    base = _first_counters()
    # Some tokens at a time, so that nothing leaves the processor's caches.
    for start in range(0, vocab_size, len(base)):
        words = base[: vocab_size - start] + np.uint64(key + start * _GOLDEN & _WORD)
        _mix_unfinished(words)
        yield start + np.flatnonzero(words < np.uint64(_LUCKY))


def _key(seed: int, position: int) -> int:
    """The mixed key (seed, position), of 64 bits."""

    def mixed(word: int) -> int:
        word = (word ^ word >> 30) * _MIX_1 & _WORD
        word = (word ^ word >> 27) * _MIX_2 & _WORD
        return word ^ word >> 31

    return mixed(mixed(seed + _GOLDEN & _WORD) + (position + 1) * _GOLDEN & _WORD)


def _counters(token_ids: np.ndarray) -> np.ndarray:
    """What each token adds to the key of a position, uint64."""
    return (token_ids + 1).astype(np.uint64) * np.uint64(_GOLDEN & _WORD)


@lru_cache(maxsize=1)
def _first_counters() -> np.ndarray:
    return _counters(np.arange(_TOGETHER))


def _mix_unfinished(words: np.ndarray) -> None:
    """`mix` in place on uint64, but for its last step; NumPy shifts words without signs, at half of what it costs."""
    shifted = words >> np.uint64(30)
    words ^= shifted
    words *= np.uint64(_MIX_1 & _WORD)
    np.right_shift(words, np.uint64(27), out=shifted)
    words ^= shifted
    words *= np.uint64(_MIX_2 & _WORD)


class NoiseRows:
    """The noise of consecutive positions, for drafts and verifications alike; computed some ``block`` at a time.

    Args:
        token_ids: of which tokens, int64 [V].
    """

    def __init__(self, seed: int, token_ids: torch.Tensor, block: int = 16):
        self.seed, self.block, self.token_ids = seed, block, token_ids
        self._first = 0
        self._rows = torch.empty(0, len(token_ids), dtype=torch.float64, device=token_ids.device)
        self._parts: list[NoiseRows] = []

    def rows(self, first: int, count: int, skip: int = 0, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """The noise of ``count`` positions, float64 [count, V], the first of them ``skip`` behind ``first``.

        New noise is computed from ``first`` on, so that it also serves requests for the positions that are skipped.

        Args:
            token_ids: where given, of which tokens alone, int64 [v]; the same tensor in all calls of a text.
        """
        if token_ids is not None:
            if self._large:
                return self._of(token_ids).rows(first, count, skip)
            return self.rows(first, count, skip).index_select(1, token_ids)
        end = first + skip + count
        if first < self._first or end > self._first + len(self._rows):
            positions = torch.arange(first, end + self.block, device=self.token_ids.device)
            self._first, self._rows = first, gumbel(self.seed, positions, self.token_ids)
        return self._rows[first + skip - self._first : end - self._first]

    def highest(self, scores: torch.Tensor, position: int) -> tuple[int, float]:
        """The token whose score [V] plus noise is the highest, the first of equal ones, and that sum; on the host."""
        values = scores.numpy(force=True)
        there = self._first <= position < self._first + len(self._rows)
        if self._large and not there and math.isfinite(values.max()):
            return highest_with_noise(values, self.seed, position)
        return highest_of((scores + self.rows(position, 1)[0]).numpy(force=True))

    @property
    def _large(self) -> bool:
        """Whether noise of all tokens is so much that it is made only for those that need it.

        With fewer it is less than the calls that tell which these are.
        """
        return len(self.token_ids) >= _LARGE

    def _of(self, token_ids: torch.Tensor) -> "NoiseRows":
        for part in self._parts:
            if part.token_ids is token_ids:
                return part
        self._parts.append(NoiseRows(self.seed, token_ids, self.block))
        return self._parts[-1]


def highest_of(scores: np.ndarray) -> tuple[int, float]:
    """The index of the highest score [V], the first of equal ones, and the score; NaN counts as the highest."""
    # NumPy promises the first one, at a tenth of what `first_argmax` costs.
    best = int(scores.argmax())
    return best, float(scores[best])
