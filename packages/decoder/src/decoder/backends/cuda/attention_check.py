"""The test of attention that promises bits on a device: tokens alone and among others, and against one softmax."""

import torch

from decoder.backends.attention import Scores
from decoder.backends.base import AttentionShape
from decoder.backends.check import ALLOWED, difference
from decoder.backends.cuda import bitwise_split_kv
from decoder.backends.cuda.bitwise_split_kv import SPLIT
from decoder.backends.cuda.tails import COLUMNS, DEPTH, tail_slots
from decoder.backends.reference.attention import masked_softmax
from decoder.sampling.token_tree import TokenTree

_CHAIN = 45
# Where tails begin to move, on both sides of a split, and more splits than are merged at once.
_LENGTHS = (1, DEPTH, COLUMNS, 700, SPLIT + DEPTH - 1, SPLIT + DEPTH + 1, 3000, 20 * SPLIT)
_NODES = (60, 5, 16)


def _by_kernel(query, key, value, length, depths, mask) -> torch.Tensor:
    tails = tail_slots(length, depths, mask, len(depths)).to(query.device)
    return bitwise_split_kv.bitwise_split_kv_attention(query, key, value, tails, query.shape[-1] ** -0.5)


@torch.inference_mode()
def kernel_fault(shape: AttentionShape, device: torch.device) -> str | None:
    """Test the kernels of a device against one softmax in float64, and the bits of tokens beside others."""
    generator = torch.Generator(device).manual_seed(1)
    for length in _LENGTHS:
        query, key, value = (
            torch.randn(1, heads, slots, dim, generator=generator, device=device).to(shape.dtype)
            for heads, slots, dim in (
                (shape.heads, _CHAIN, shape.dim),
                (shape.kv_heads, length + _CHAIN, shape.dim),
                (shape.kv_heads, length + _CHAIN, shape.value_dim),
            )
        )
        actual = _by_kernel(query, key, value, length, range(_CHAIN), None)
        blocked = torch.ones(_CHAIN, _CHAIN, dtype=torch.bool, device=device).triu(1)
        expected = masked_softmax(query.double(), key.double(), value.double(), blocked, Scores(shape.dim**-0.5))
        fault = difference(actual, expected, ALLOWED[shape.dtype])
        if fault:
            return f"{fault} in attention behind {length} tokens"
    return _bits_fault(shape, device)


@torch.inference_mode()
def _bits_fault(shape: AttentionShape, device: torch.device) -> str | None:
    """Compare the tokens of trees and chains, behind sequences of several lengths, with each token alone."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(shape.dtype)

    most = max(*_NODES, _CHAIN)
    slots = max(_LENGTHS) + most
    key, value = random(1, shape.kv_heads, slots, shape.dim), random(1, shape.kv_heads, slots, shape.value_dim)
    query = random(1, shape.heads, most, shape.dim)
    trees = [tree_of(count) for count in _NODES]
    for number, length in enumerate(_LENGTHS):
        tree = trees[number % len(trees)]
        for depths, mask in ((tree.depths, tree.ancestor_mask()), (list(range(_CHAIN)), None)):
            found = _by_kernel(query[:, :, : len(depths)], key, value, length, depths, mask)
            for node in (0, 1, len(depths) // 2, len(depths) - 1):
                # Write the token's own path over the tree for a while, which saves a copy of the cache.
                end = length + depths[node] + 1
                others = [states[:, :, length:end].clone() for states in (key, value)]
                if mask is not None:
                    path = (length + mask[node].nonzero()[:, 0]).to(device)
                    for states in (key, value):
                        states[:, :, length:end] = states[:, :, path]
                alone = _by_kernel(query[:, :, node : node + 1], key, value, end - 1, [0], None)
                for states, other in zip((key, value), others, strict=True):
                    states[:, :, length:end] = other
                if not torch.equal(alone[0, :, 0], found[0, :, node]):
                    kind = "a run" if mask is None else "a tree"
                    return f"attention gives a token of {kind} of {len(depths)} behind {length} others other bits alone"
    return None


def tree_of(nodes: int) -> TokenTree:
    """A tree of a chain, with a sibling for each of its nodes."""
    tree, parent = TokenTree(0), 0
    for token in range(1, nodes):
        child = tree.add(parent, token, "test")
        parent = child if token % 2 else parent
    return tree
