"""The keys and values that an EAGLE-3 draft model has of a text, and behind it of the drafts of one step."""

from collections.abc import Callable, Sequence

import torch

from decoder.backends.transfers import upload
from decoder.eagle3.draft_model import Eagle3DraftModel

_MOST_PENDING = 64  # entries that wait until levels are drafted: they are computed with the first one
_ROOM = 256  # slots beyond the window, or by which the cache of a whole text grows at least


class Eagle3TextCache:
    """What the draft model knows of one text: keys and values [kv_heads, length, D] of its entries.

    The entry of position t + 1 is made of the token there and the target's features of position t. New ones wait until
    drafts are wanted, so that steps without drafts cost little. With a sliding window only the entries within it are
    kept, since one layer's keys and values depend on nothing but their own entry.

    Args:
        draft_model: the draft model.
        device: where its weights are.
    """

    def __init__(self, draft_model: Eagle3DraftModel, device: torch.device):
        self.draft_model, self.device = draft_model, device
        self.window = draft_model.config.sliding_window
        config, weight = draft_model.config, draft_model.fc.weight
        self._pairs = weight.new_empty(2, config.kv_heads, (self.window or 0) + _ROOM, config.head_dim)
        self.length = 0  # slots that hold entries
        self.entries = 0  # of the text, those included that have left the window
        self._features: list[torch.Tensor] = []
        self._tokens: list[int] = []

    @staticmethod
    def planned_bytes(draft_model: Eagle3DraftModel, tokens: int) -> int:
        """What the keys and values of a text of so many tokens take, but for what a growing cache has to spare."""
        config = draft_model.config
        slots = max(tokens, _ROOM) if config.sliding_window is None else config.sliding_window + _ROOM
        return 2 * config.kv_heads * slots * config.head_dim * draft_model.fc.weight.itemsize

    @property
    def pending(self) -> int:
        """How many entries wait to be computed."""
        return len(self._tokens)

    def add(self, features: torch.Tensor, tokens: Sequence[int]) -> None:
        """Add entries: ``tokens`` n, and the target's ``features`` [n, c] of the positions before them."""
        self._features.append(features)
        self._tokens += tokens

    def absorb(self, embed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Compute the keys and values of all entries but the newest, if many wait; ``embed`` gives embeddings."""
        if self.pending <= _MOST_PENDING:
            return
        newest = self._tokens[-1]
        features, tokens, positions = self.take()
        if self.window is not None:
            # What has left the window already is never looked at.
            gone = max(0, len(tokens) - 1 - self.window)
            self.entries += gone
            features, tokens, positions = features[gone:], tokens[gone:], positions[gone:]
        count = len(tokens) - 1
        state = self.draft_model.combine(features[:count])
        _, keys, values, _ = self.draft_model.project(state, embed(tokens[:count]), positions[:count])
        self.write(keys, values)
        self.add(features[count:], [newest])

    def take(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The entries that wait, which the caller must `write`: features [n, c], tokens [n] and positions [n]."""
        features, tokens = torch.cat(self._features), upload(self._tokens, self.device)
        self._features, self._tokens = [], []
        first = self.entries + 1
        return features, tokens, torch.arange(first, first + len(tokens), device=self.device)

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append the keys and values [n, kv_heads, D] of the text's next entries."""
        self._put(keys, values, self.length)
        self.length += len(keys)
        self.entries += len(keys)

    def write_drafts(self, keys: torch.Tensor, values: torch.Tensor, drafts: int) -> None:
        """Write those of a level of drafts, [n, kv_heads, D], behind the ``drafts`` drafts of this step so far."""
        self._put(keys, values, self.length + drafts)

    def read(self, drafts: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, n, D] of the window, with so many ``drafts`` behind it."""
        first = 0 if self.window is None else max(0, self.length - self.window)
        keys, values = self._pairs[:, :, first : self.length + drafts]
        return keys, values

    def _put(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        if start + len(keys) > self._pairs.shape[2]:
            start -= self._make_room(start + len(keys) - self.length)
        for pairs, new in zip(self._pairs, (keys, values), strict=True):
            pairs[:, start : start + len(new)] = new.transpose(0, 1)

    def _make_room(self, new: int) -> int:
        """Make room for ``new`` slots behind the text; returns by how many slots the text has moved to the front."""
        kept = self.length if self.window is None else min(self.length, self.window)
        moved, slots = self.length - kept, kept + new
        # Drafts of this step stand behind the text and move with it.
        old = self._pairs[:, :, moved:]
        capacity = self._pairs.shape[2]
        if slots > capacity:
            capacity = max(slots + _ROOM, 2 * capacity if self.window is None else 0)
        pairs = self._pairs.new_empty(*self._pairs.shape[:2], capacity, self._pairs.shape[3])
        pairs[:, :, : old.shape[2]] = old[:, :, :capacity]
        self._pairs, self.length = pairs, kept
        return moved
