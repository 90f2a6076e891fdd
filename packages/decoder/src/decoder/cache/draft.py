"""The base class of the caches of draft passes: fixed slots for the sequence, and room behind for drafted tokens."""

from decoder.cache.base import LayeredCache
from decoder.cache.full import FullCache


class DraftCache(LayeredCache):
    """At most ``budget`` entries of committed tokens per KV head, and ``room`` slots behind them for drafted tokens.

    Subclasses choose the committed entries. A draft pass writes those of its tokens behind them, and the next draft
    pass writes over these, except for the first ones, as many as `hold` has set. Keys carry their own rotary positions,
    so attention does not depend on the order of the slots.

    What layers keep that do not attend to the whole sequence is taken as it is from the sequence's full cache, behind
    which drafted tokens are written there.

    Args:
        budget: slots for committed tokens.
        room: slots for drafted tokens.
    """

    purpose = "draft"

    def __init__(self, budget: int, room: int):
        super().__init__(budget + room)
        self.budget, self.room = budget, room
        self._filled = 0
        self._held = 0
        self._follows = False

    def _make_room(self, count: int) -> None:
        if self._held + count > self.room:
            raise ValueError(f"the draft cache has room for {self.room} drafted tokens; {self._held + count} came")

    def follow(self, full: FullCache) -> None:
        """Draft behind the sequence of this cache."""
        self.layout, self.states, self._follows = full.layout, full.states, True

    @property
    def held(self) -> int:
        return self._held

    def hold(self, count: int) -> None:
        """Protect the first ``count`` drafted tokens from the next draft pass; a commit releases all of them."""
        self._held = count

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._filled + self._held

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes if self._follows else super().nbytes
