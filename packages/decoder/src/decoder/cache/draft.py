"""What the caches of draft passes share: a fixed number of slots, and room behind them for drafted tokens."""

from decoder.cache.base import LayeredCache


class DraftCache(LayeredCache):
    """At most ``budget`` pairs of committed tokens per KV head, and ``room`` slots behind them.

    Subclasses say which pairs these are. A draft pass writes its tokens behind them; the next pass writes over them,
    but for the first ones that `hold` was told to hold. Keys carry their own rotary positions, so the order of the
    slots means nothing to attention.

    Args:
        budget: slots for committed tokens.
        room: drafted tokens behind them, held ones included.
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
        """Of the drafted tokens, the first ``count`` stay for the passes to come; commits let go of all."""
        self._held = count

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._filled + self._held
