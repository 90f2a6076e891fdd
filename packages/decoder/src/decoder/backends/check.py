"""The one test at load: a backend's passes against the reference's, on the model's own weights.

What runs here may never have run on such a card, processor, driver or library, so wrong numbers and failures of any
kind must show before a text does. A wrong function's errors are about as large as its results.
"""

from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

import torch

from decoder.backends.base import Chain, PassBackend, PassBatch, PassOutput, Tree
from decoder.backends.bitwise import has_experts
from decoder.backends.forwards import replaced
from decoder.backends.native.quantised import QuantisedLinear
from decoder.cache.full import FullCache
from decoder.sampling.filters import first_argmax
from decoder.sampling.params import SamplingParams
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree

if TYPE_CHECKING:
    from decoder.model.target import Target

ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2**-6, torch.bfloat16: 2**-5}
"""Largest allowed error of one function, relative to the largest number of its result."""
# Of a whole pass, whose layers each round: the norm of the errors as a share of that of a row of the results.
_ALLOWED_IN_PASSES = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.2}
_ALLOWED_QUANTISED = 0.1

_PARENTS = (0, 1, 2, 3, 3, 4, 5)  # of the nodes of the tree, below its root: a chain of four that branches
_CHAIN = 4
_STRIDE = 619
_CHOSEN = 2  # tokens of each setting
_SETTINGS = (
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(min_p=0.05, repetition_penalty=1.3, seed=2),
    SamplingParams(temperature=1.5, repetition_penalty=0.8, seed=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, top_k=30, top_p=0.87, seed=4),
)


class Expected(NamedTuple):
    """What a pass of the reference over `trial_tree` has given, with the keys and values of its nodes."""

    output: PassOutput
    entries: list[torch.Tensor]


def trial_tree(vocab_size: int) -> TokenTree:
    """The tree that both run."""
    tree = TokenTree(_token(0, vocab_size))
    for node, parent in enumerate(_PARENTS, start=1):
        tree.add(parent, _token(node, vocab_size), "test")
    return tree


def _token(node: int, vocab_size: int) -> int:
    """From all over the vocabulary: behind control tokens in a row many a model gives numbers that rounding changes."""
    return (vocab_size // 3 + _STRIDE * node) % vocab_size


def difference(actual: torch.Tensor, expected: torch.Tensor, allowed: float) -> str | None:
    """In what ``actual`` differs from ``expected`` by more than ``allowed``, in words; NaN always differs."""
    if actual.shape != expected.shape:
        return f"it gives numbers of shape {tuple(actual.shape)} in place of {tuple(expected.shape)}"
    actual, expected = actual.double(), expected.double()
    largest = expected.abs().max()
    error = (actual - expected).abs().max()
    if error <= allowed * largest:
        return None
    return f"its numbers differ from the plain function's by up to {float(error):.2g} (these are up to {largest:.2g})"


@torch.inference_mode()
def backend_fault(target: "Target", backend: PassBackend, expected: Expected) -> str | None:
    """Compare the passes of a backend with what was ``expected``; what is wrong, in words."""
    tree = trial_tree(target.vocab_size)
    with replaced(backend.called):
        fault = _fault_in_decoding(target, backend, expected, tree) or _fault_in_a_tree(target, backend, expected, tree)
    return fault or _fault_in_choices(backend, expected.output.logits)


def _fault_in_decoding(target: "Target", backend: PassBackend, expected: Expected, tree: TokenTree) -> str | None:
    """Of the chain, token by token."""
    cache, outputs = FullCache(_CHAIN + backend.width(1)), []
    for node in range(_CHAIN):
        outputs.append(backend.run(PassBatch([Tree(TokenTree(tree.tokens[node]), cache)], True)))
        outputs[-1] = PassOutput.joined(outputs[-1:])  # a copy, since a later pass may overwrite it
        cache.keep([0])
    return _fault(target, PassOutput.joined(outputs), expected.output.part(slice(0, _CHAIN)), "tokens alone")


def _fault_in_a_tree(target: "Target", backend: PassBackend, expected: Expected, tree: TokenTree) -> str | None:
    """Of the tree behind the chain, whose last token is its root."""
    first, nodes = _CHAIN - 1, len(tree)
    below = TokenTree(tree.tokens[first])
    for node in range(_CHAIN, nodes):
        below.add(tree.parents[node] - first, tree.tokens[node], "test")
    cache = FullCache(first + backend.width(len(below)))
    backend.run(PassBatch([Chain(tree.tokens[:first], 0, cache)], False))
    cache.keep(range(first))
    for _ in range(backend.warm_up_runs):
        output = backend.run(PassBatch([Tree(below, cache)], True, len(below)))
        fault = _fault(target, output, expected.output.part(slice(first, nodes)), f"a tree of {len(below)} nodes")
        if fault is not None:
            return fault
    pairs = zip(
        cycle(("keys", "values")), cache.beginning(nodes, target.layout.keeping), expected.entries, strict=False
    )
    faults = (_off(target, words, own, other) for words, own, other in pairs)
    return next((fault for fault in faults if fault), None)


def _fault(target: "Target", output: PassOutput, expected: PassOutput, of: str) -> str | None:
    compared: list[tuple[str, torch.Tensor, torch.Tensor]] = [("hidden states", output.hidden, expected.hidden)]
    compared.append(("logits", output.logits, expected.logits))
    if output.queries:
        if output.queries.keys() != expected.queries.keys():
            return "it hands over the queries of other layers"
        compared += [("queries", output.queries[layer], own) for layer, own in expected.queries.items()]
    faults = (_off(target, f"{words} of {of}", *pair) for words, *pair in compared)
    return next((fault for fault in faults if fault), None)


def _off(target: "Target", words: str, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Whether the errors of some numbers are more than rounding can be."""
    if actual.shape != expected.shape:
        return f"the {words} are of shape {tuple(actual.shape)} in place of {tuple(expected.shape)}"
    mine, theirs = (one.double().flatten(0, -2) for one in (actual, expected))
    # Some models mark tokens that do not exist with the least number of their dtype.
    usual = theirs.abs() < torch.finfo(expected.dtype).max / 2
    off, sizes = ((mine - theirs) * usual).nan_to_num(torch.inf).norm(dim=1), (theirs * usual).norm(dim=1)
    # Of a token whose embedding is zero, such as padding's, keys and values may be zero.
    errors = torch.where(off == 0, off, off / sizes)
    # In half precision the numbers of an odd token may be any.
    dtype = _coarsest(target)
    most = 1.0 if dtype in (torch.float32, torch.float64) else 0.75
    allowed = _ALLOWED_IN_PASSES.get(dtype, 0.2)
    if _turns(target):
        most, allowed = 0.5, max(2 * allowed, _ALLOWED_QUANTISED)
    error = float(errors.sort()[0][int(most * (len(errors) - 1))])
    return None if error <= allowed else f"the {words} are off by {error:.2g} of their norm"


def _coarsest(target: "Target") -> torch.dtype:
    """The dtype of the language-model head, or of the embeddings, which layers go on in, if that rounds more."""
    embeddings = target.model.get_input_embeddings()
    own = getattr(embeddings, "dtype", embeddings.weight.dtype)
    return max(target.dtype, own, key=lambda dtype: torch.finfo(dtype).eps)


def _turns(target: "Target") -> bool:
    """Whether a small difference turns roundings of inputs to eight bits, or the choice of experts."""
    short = any(isinstance(module, QuantisedLinear) for module in target.modules)
    return short or (target.dtype not in (torch.float32, torch.float64) and has_experts(target.model))


def _fault_in_choices(backend: PassBackend, logits: torch.Tensor) -> str | None:
    """Compare the tokens that a backend chooses from the model's own logits [T, V] with the sampler's."""
    vocab_size = logits.shape[1]
    for params in _SETTINGS:
        choice = backend.choice(params)
        if choice is None:
            return None
        sampler = Sampler(params, vocab_size, logits.device, list(range(0, vocab_size, 5)))
        for row in logits[:_CHOSEN]:
            found = choice.highest(row, len(sampler.context), sampler.window.penalised)
            token = int(first_argmax(sampler.scores(row)))
            if found is not None and found[0] != token:
                return f"it draws {found} where {token} has the highest score"
            sampler.push(token)
    return None
