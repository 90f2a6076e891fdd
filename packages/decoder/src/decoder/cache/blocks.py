"""Buffers in which the caches of several texts stand beside each other, so that one product can take all of them."""

from weakref import WeakSet

import torch

_CACHES = 8  # in a block
_SMALLEST, _LARGEST = 512, 4096  # slots; behind more tokens reading their pairs takes longer than calls


class Block:
    """Buffers for several caches of equally many slots.

    On a CPU the memory of slots that nothing was written to is not taken. There the product of a few queries with keys
    reads them in half the time if the slots of each number lie beside each other, and so they do.

    Attributes:
        keys, values: [layers, caches, KV heads, slots, head size], the keys a transposed view.
        free: which of the caches nobody uses.
        finite: how many slots of each cache were written to.

    Args:
        key, value: pairs like those to come, [1, KV heads, any, head size].
        layers, slots: how many.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, layers: int, slots: int):
        self.keys = key.new_empty(layers, _CACHES, key.shape[1], slots, key.shape[3])
        self.values = value.new_empty(layers, _CACHES, value.shape[1], slots, value.shape[3])
        self.free = set(range(_CACHES))
        self.finite = [0] * _CACHES

    @property
    def slots(self) -> int:
        return self.keys.shape[3]

    @property
    def idle_bytes(self) -> int:
        """Bytes that were written to in caches that nobody uses."""
        written = sum(self.finite[place] for place in self.free)
        return written * (self.keys[:, 0, :, 0].nbytes + self.values[:, 0, :, 0].nbytes)


class Blocks:
    """The blocks of an engine; a block goes with the last cache in it."""

    def __init__(self) -> None:
        self._blocks: WeakSet[Block] = WeakSet()

    def enter(self, key: torch.Tensor, value: torch.Tensor, layers: int, slots: int) -> tuple[Block, int] | None:
        """A block and a free place in it for a cache of at least so many slots, None if it is too long for a block.

        Args:
            key, value: pairs like those to come, [1, KV heads, any, head size].
        """
        wanted = _rounded(slots)
        if wanted > _LARGEST:
            return None
        kind = layers, key.shape[1], wanted, key.shape[3]
        for block in self._blocks:
            if block.free and block.keys.dtype == key.dtype and (*block.keys.shape[:1], *block.keys.shape[2:]) == kind:
                break
        else:
            block = Block(key, value, layers, wanted)
            self._blocks.add(block)
        # The first one, so that those in use stand close together.
        place = min(block.free)
        block.free.remove(place)
        return block, place

    def idle_bytes(self, capacity: int) -> int:
        """Bytes that ended texts have left in places which a cache of this capacity would not take."""
        size = _rounded(capacity)
        return sum(block.idle_bytes for block in self._blocks if not size <= block.slots <= 2 * size)


def _rounded(slots: int) -> int:
    return max(_SMALLEST, 1 << (slots - 1).bit_length())
