"""Answers of `/v1/responses` that are kept, so that a request can go on behind one."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from decoder.serve.errors import ApiError

Item = dict[str, Any]
"""An item of a conversation, as requests and answers have it."""

_MOST = 1000  # answers
_MOST_BYTES = 2**26  # of their JSON and that of the items before


class Kept:
    """The last answers, in memory, until there are too many or the server ends."""

    def __init__(self):
        self._kept: OrderedDict[str, tuple[dict[str, Any], list[Item], int]] = OrderedDict()
        self._bytes, self._lock = 0, threading.Lock()

    def add(self, response: dict[str, Any], items: Sequence[Item]) -> None:
        """Keep an answer, behind the ``items`` of its conversation."""
        size = len(json.dumps([response, items]))
        if size > _MOST_BYTES:
            return
        with self._lock:
            self._kept[response["id"]] = response, list(items), size
            self._bytes += size
            while len(self._kept) > _MOST or self._bytes > _MOST_BYTES:
                self._bytes -= self._kept.popitem(last=False)[1][2]

    def get(self, name: str) -> tuple[dict[str, Any], list[Item]]:
        """An answer, and the items before it. Raises ApiError 404."""
        found = self._kept.get(name)
        if found is None:
            raise ApiError(404, f"no response {name[:80]!r} is kept here", "response_id", "not_found")
        return found[:2]

    def remove(self, name: str) -> None:
        """Forget an answer. Raises ApiError 404."""
        self.get(name)
        with self._lock:
            if found := self._kept.pop(name, None):
                self._bytes -= found[2]

    def items_behind(self, name: str | None) -> list[Item]:
        """The items of the conversation that ends with an answer; none for None. Raises ApiError 400."""
        if name is None:
            return []
        try:
            response, items = self.get(name)
        except ApiError as error:
            words = "previous_response_id: it is not kept, or no more: send all items as input"
            raise ApiError(400, words, "previous_response_id", "previous_response_not_found") from error
        return [*items, *response["output"]]

    def resolved(self, items: Sequence[Any]) -> list[Any]:
        """Items with those that are kept in the place of what refers to them by their ids. Raises ApiError 400."""
        return [
            self._item(one.get("id"), f"input[{index}].id")
            if isinstance(one, dict) and one.get("type") == "item_reference"
            else one
            for index, one in enumerate(items)
        ]

    def _item(self, name: Any, place: str) -> Item:
        with self._lock:
            kept = list(self._kept.values())
        for response, _, _ in reversed(kept):
            for item in response["output"]:
                if item["id"] == name:
                    return item
        raise ApiError(400, f"{place} is that of no item that is kept: send the item itself", "input")
