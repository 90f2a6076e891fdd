"""Buffers in which the caches of several texts stand beside each other, so that one product can take all of them."""

from weakref import WeakSet

import torch

from decoder.kernels.bitwise_attention import SPARE, empty_transposed, wide_dtype

_CACHES = 8  # in a block
_SMALLEST, _LARGEST = 512, 4096  # slots; what sharing products brings to longer texts is not measured


class Block:
    """Buffers for several caches of equally many slots.

    On a CPU no memory is taken for a cache that nothing was written to. There a product of a few queries with the keys
    of several texts takes two thirds of the time where a number's slots lie beside each other, as they do here.

    Attributes:
        keys, values: [layers, caches, KV heads, slots, head size], the keys a transposed view.
        free: which of the caches nobody uses.
        left: which of them somebody has used.

    Args:
        key, value: pairs like those to come, [1, KV heads, any, head size].
        layers, slots: how many.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, layers: int, slots: int):
        self.keys = empty_transposed(key, layers, _CACHES, key.shape[1], slots, key.shape[3])
        self.values = value.new_empty(layers, _CACHES, value.shape[1], slots, value.shape[3])
        self.free = set(range(_CACHES))
        self.left: set[int] = set()

    @property
    def slots(self) -> int:
        return self.keys.shape[3]

    @property
    def idle_bytes(self) -> int:
        """Bytes of caches that nobody uses and somebody has used."""
        return len(self.left) * (self.keys[:, 0].nbytes + self.values[:, 0].nbytes)


class Blocks:
    """The blocks of an engine; a block goes with the last cache in it."""

    def __init__(self) -> None:
        self._blocks: WeakSet[Block] = WeakSet()

    def enter(self, key: torch.Tensor, value: torch.Tensor, layers: int, slots: int) -> tuple[Block, int] | None:
        """A block and a free place in it for a cache of at least so many slots.

        None if it is too long for a block, or of half precision, whose prefixes are read by a kernel that does not know
        transposed keys, or if the whole block does not fit the memory, as a cache alone still may.

        Args:
            key, value: pairs like those to come, [1, KV heads, any, head size].
        """
        wanted = rounded(slots)
        if wanted is None or wide_dtype(key.dtype) != key.dtype:
            return None
        kind = layers, key.shape[1], wanted, key.shape[3]
        for block in self._blocks:
            if block.free and block.keys.dtype == key.dtype and (*block.keys.shape[:1], *block.keys.shape[2:]) == kind:
                break
        else:
            try:
                block = Block(key, value, layers, wanted)
            except RuntimeError:  # what PyTorch's allocator raises
                return None
            self._blocks.add(block)
        # The first one, so that those in use stand close together.
        place = min(block.free)
        block.free.remove(place)
        block.left.discard(place)
        return block, place

    def idle_bytes(self, capacity: int | None = None) -> int:
        """Bytes that ended texts have left in places which a cache of this ``capacity``, if any, would not take."""
        slots = None if capacity is None else rounded(capacity + SPARE)
        return sum(block.idle_bytes for block in self._blocks if block.slots != slots)


def rounded(slots: int) -> int | None:
    """The slots of the block for a cache of at least so many; None if it is too long for a block."""
    wanted = max(_SMALLEST, 1 << (slots - 1).bit_length())
    return wanted if wanted <= _LARGEST else None
