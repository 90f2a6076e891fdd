"""Prefix reuse: a prompt that begins as an earlier sequence takes over its keys and values and prefills the rest."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from decoder.backends.forwards import under_autocast
from decoder.backends.memory import available_memory
from decoder.cache.draft_layer import DraftLayerCache, KeptEntries
from decoder.cache.form import CacheForm
from decoder.cache.full import Copies, FullCache
from decoder.drafters.base import FeatureReader
from decoder.model.target import Target
from decoder.parallel.sharding import own_part
from decoder.work import Work

_USUAL_BYTES = 2**30
_SHORTEST = 16  # tokens; prompts of all kinds begin with the same few, which are faster prefilled than looked up


@dataclass(eq=False)
class _Kept:
    """The first tokens of an earlier sequence, int32 [n], and what `FullCache.copying` gave, entries of ``dtype``.

    ``entries`` are those of the draft layer that followed it, if one did.
    """

    tokens: torch.Tensor
    form: CacheForm
    dtype: torch.dtype
    copies: Copies
    entries: KeptEntries | None

    def __post_init__(self):
        self.nbytes = self.tokens.nbytes + self.copies.nbytes + (self.entries.nbytes if self.entries else 0)
        self.kind = _kind(self.tokens, self.form)

    def followed_by(self, reader: FeatureReader | None) -> int:
        """Of how many tokens there are all entries that a drafter goes on from."""
        if reader is None:
            return len(self.tokens)
        return self.entries.entries if self.entries is not None and self.entries.layer is reader.heads else 0

    def shared(self, tokens: torch.Tensor) -> int:
        """How many tokens it has in common with the beginning of ``tokens``."""
        count = min(len(self.tokens), len(tokens))
        different = (self.tokens[:count] != tokens[:count]).nonzero()
        return int(different[0]) if len(different) else count


def _kind(tokens: torch.Tensor, form: CacheForm) -> Hashable:
    """What is equal for two sequences of which one may take over a part of the other."""
    return form, tuple(tokens[:_SHORTEST].tolist())


class _KeptSequences:
    """The kept sequences, found by their first tokens: there may be thousands, and nearly all of them begin otherwise.

    Attributes:
        nbytes: of all of them.
    """

    def __init__(self):
        self.nbytes = 0
        self._in_turn: dict[int, _Kept] = {}  # by identity, the one that was used last at the end
        self._alike: dict[Hashable, list[_Kept]] = {}

    def like(self, tokens: torch.Tensor, form: CacheForm) -> list[_Kept]:
        """Those that have as many tokens as are worth it in common with a sequence, in a cache of this form."""
        return list(self._alike.get(_kind(tokens, form), ()))

    def add(self, one: _Kept) -> None:
        self._in_turn[id(one)] = one
        self._alike.setdefault(one.kind, []).append(one)
        self.nbytes += one.nbytes

    def remove(self, one: _Kept) -> None:
        del self._in_turn[id(one)]
        self._alike[one.kind].remove(one)
        if not self._alike[one.kind]:
            del self._alike[one.kind]
        self.nbytes -= one.nbytes

    def use(self, one: _Kept) -> None:
        """Make it the one that leaves last."""
        self._in_turn[id(one)] = self._in_turn.pop(id(one))

    def make_room(self, nbytes: int, most: int) -> None:
        """Let those leave that were used least recently, until there is room for so many bytes more."""
        while self._in_turn and self.nbytes + nbytes > most:
            self.remove(next(iter(self._in_turn.values())))


def usual_bytes(target: Target) -> int:
    """How many bytes of caches are kept where nobody says it: a share of the memory, where they change no bit."""
    return min(_USUAL_BYTES, available_memory(target.device) // 8) if target.bitwise.holds else 0


def prefix_reuse(target: Target, max_bytes: int) -> "PrefixReuse | None":
    """`PrefixReuse` with so many bytes, None for 0. Raises ValueError if it is no integer of at least 0."""
    if type(max_bytes) is not int or max_bytes < 0:
        raise ValueError(f"prefix_cache_bytes must be an integer of at least 0, not {max_bytes!r}")
    return PrefixReuse(target, max_bytes) if max_bytes else None


class PrefixReuse:
    """Keeps copies of the caches of sequences that have ended; the one that was used least recently leaves first.

    Entries are functions of the model and the tokens before them, so they may be taken over as long as the model is the
    same. Whether it is shows in two ways: by its parameters (which tensors they are, and how often PyTorch has seen
    them written to), and by the last entry that is taken over, which is computed again and compared. Where it has
    changed, all is forgotten, and what a sequence that runs then has computed is not kept: it may be of both models.

    With `Target.bitwise`, and in float64 as far as roundings matter, a sequence is the one without reuse. Elsewhere
    entries that were decoded differ by rounding from entries that were prefilled, as they do between two methods.

    Args:
        target: the model.
        max_bytes: how many bytes are kept at most; of a longer sequence the beginning is.
    """

    def __init__(self, target: Target, max_bytes: int):
        self.target, self.max_bytes = target, max_bytes
        self._kept = _KeptSequences()
        self._model_state: object = None
        self._begun_with: WeakKeyDictionary[FullCache, object] = WeakKeyDictionary()  # the model's state

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self._kept.nbytes

    def clear(self) -> None:
        """Forget all sequences."""
        self._kept = _KeptSequences()

    def begin(self, cache: FullCache) -> None:
        """Note with which model a sequence begins; only the caches of such sequences are kept."""
        self._check_model()
        self._begun_with[cache] = self._model_state

    def taking_over(
        self, prompt: Sequence[int], cache: FullCache, computed: int, reader: FeatureReader | None = None
    ) -> "Work[Reused | None]":
        """Fill an empty cache with the entries of as many of the prompt's first tokens as are kept, if any.

        Args:
            prompt: the tokens to be prefilled.
            computed: how many of its last tokens must be prefilled in any case.
            reader: what follows the text with entries of its own, which begins likewise.
        """
        tokens = torch.tensor(prompt, dtype=torch.int32)
        alike = self._kept.like(tokens, cache.form)
        if not alike or under_autocast():
            return None

        def usable(one: _Kept) -> int:
            # The last token that is shared is prefilled, too: its entry is compared.
            most = min(one.shared(tokens) - 1, len(prompt) - max(1, computed), one.followed_by(reader))
            return one.copies.goes_back_to(most)

        best = max(alike, key=usable)
        count = usable(best)
        if count < _SHORTEST:
            return None
        self._kept.use(best)
        yield from self.target.beginning_with(cache, best.copies, count, best.dtype)
        if reader is not None:
            reader.begin_with(best.entries, count)
        return Reused(count, cache.entry_at(count, best.copies))

    def confirm(self, reused: "Reused", cache: FullCache) -> bool:
        """Whether the prefilled rest shows that the model is still the one of the entries that were taken over.

        If it is not, all sequences are forgotten, and the cache is empty again.
        """
        pairs = zip(cache.entry_at(reused.count), reused.pair, strict=True)
        if self.target.ranks.all(all(self._same(*pair, cache.form) for pair in pairs)):
            return True
        self.clear()
        cache.rewind(0)
        return False

    def _same(self, new: torch.Tensor, old: torch.Tensor, form: CacheForm) -> bool:
        if self.target.bitwise.rule is not None:
            return torch.equal(new, old)
        # Roundings alone are far smaller than this, and what another model gives is not.
        tolerance = max(math.sqrt(torch.finfo(new.dtype).eps), 2 * form.error)
        return new.dtype == old.dtype and torch.allclose(new, old, tolerance, tolerance * float(old.abs().amax()))

    def keeping(self, sequence: Sequence[int], cache: FullCache, reader: FeatureReader | None = None) -> Work[None]:
        """Keep a copy of the entries of a sequence that has ended; ``cache`` holds those of its first tokens.

        ``reader`` has followed it with entries of its own.
        """
        self._check_model()
        if self._begun_with.get(cache) is not self._model_state:
            return
        entry_bytes = cache.form.token_bytes(self.target.attention_shape, len(cache.layout.full))
        beside = sum(state.snapshot.nbytes for state in cache.states.values())
        if reader is not None:
            entry_bytes += DraftLayerCache.entry_bytes(reader.heads)
        room = max(0, self.max_bytes - beside) // (entry_bytes + torch.int32.itemsize)
        count = cache.goes_back_to(min(cache.length, room))
        if count < _SHORTEST or under_autocast():
            return
        tokens = torch.tensor(sequence[:count], dtype=torch.int32)
        for one in self._kept.like(tokens, cache.form):
            shared = one.shared(tokens)
            if reader is None and one.entries is not None and shared < count:
                continue  # of the beginning, for a drafter that goes on from it
            if shared == count and one.followed_by(reader) >= count:
                # There already, in a sequence that goes on or is the same.
                self._kept.use(one)
                return
            if shared == len(one.tokens):
                self._kept.remove(one)
        needed = tokens.nbytes + count * entry_bytes + beside
        self._kept.make_room(needed, self.max_bytes)
        state = self._model_state
        entries = None if reader is None else reader.kept(count)
        copies = yield from cache.copying(count)
        self._check_model()
        if self._model_state is state and self.nbytes + needed <= self.max_bytes:
            self._kept.add(_Kept(tokens, cache.form, cache.keys.dtype, copies, entries))

    def _check_model(self) -> None:
        """Forget all sequences if a parameter is another tensor than before, or was written to."""
        parameters = map(own_part, self.target.model.parameters())
        state: list[object] = [
            (one.data_ptr(), one.dtype, 0 if one.is_inference() else one._version) for one in parameters
        ]
        state.append((self.target.bitwise.rule, torch.get_num_threads(), self.target.backend.covers))
        if state != self._model_state:
            self._model_state = state
            self.clear()


@dataclass(frozen=True)
class Reused:
    """What a cache took over: ``count`` tokens, and the entry behind them as `FullCache.entry_at` gives it."""

    count: int
    pair: list[torch.Tensor]
