"""The base class of the caches that draft passes use: fixed slots for the text, and room behind for drafted tokens."""

from decoder.cache.base import LayeredCache


class DraftCache(LayeredCache):
    """At most ``budget`` pairs of committed tokens per KV head, and ``room`` slots behind them for drafted tokens.

    Subclasses choose the committed pairs. A draft pass writes the pairs of its tokens behind them, and the next draft
    pass writes over these, except for the first ones, as many as `hold` has set. Keys carry their own rotary positions,
    so attention does not depend on the order of the slots.

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

    def _make_room(self, count: int) -> None:
        if self._held + count > self.room:
            raise ValueError(f"the draft cache has room for {self.room} drafted tokens; {self._held + count} came")

    def hold(self, count: int) -> None:
        """Protect the first ``count`` drafted tokens from the next draft pass; a commit releases all of them."""
        self._held = count

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._filled + self._held
