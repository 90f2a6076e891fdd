"""What runs a model's passes on a device: the protocol of a backend, and what it is given and gives back."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import nn

from decoder.sampling.token_tree import TokenTree
from decoder.work import Work

if TYPE_CHECKING:
    from decoder.backends.native.levels import NativeLevels
    from decoder.cache.base import LayeredCache
    from decoder.drafters.draft_vocabulary import DraftVocabulary
    from decoder.sampling.native_choice import NativeChoice
    from decoder.sampling.params import SamplingParams

Forwards = Mapping[nn.Module, Callable]
"""By module, the forward that stands in the place of its own."""


class AttentionShape(NamedTuple):
    """How many query and KV heads a layer of the model has, their sizes and dtype."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def entry_bytes(self) -> int:
        """Of a token's key and value in all KV heads."""
        return self.kv_heads * (self.dim + self.value_dim) * self.dtype.itemsize


class Chain(NamedTuple):
    """Tokens of a sequence in a row, from position ``first`` on: each sees those before it and what the cache holds.

    Their ids may be on the device, int64 [T].
    """

    tokens: Sequence[int] | torch.Tensor
    first: int
    cache: "LayeredCache"

    @property
    def positions(self) -> Sequence[int]:
        """The position of each token."""
        return range(self.first, self.first + len(self.tokens))

    @property
    def parents(self) -> Sequence[int]:
        """The token before each, -1 for the first."""
        return range(-1, len(self.tokens) - 1)

    def mask(self, width: int | None = None) -> torch.Tensor | None:
        """Which token sees which: None, as it is plain causal."""
        return None


class Tree(NamedTuple):
    """The nodes of a tree, whose root stands behind the cached tokens: each sees its ancestors and the cached ones."""

    tree: TokenTree
    cache: "LayeredCache"

    @property
    def tokens(self) -> list[int]:
        """The token of each node."""
        return self.tree.tokens

    @property
    def parents(self) -> Sequence[int]:
        """The parent of each node, -1 for the root."""
        return self.tree.parents

    @property
    def positions(self) -> list[int]:
        """The position of each node: the number of cached tokens plus its depth."""
        length = self.cache.get_seq_length()
        return [length + depth for depth in self.tree.depths]

    def mask(self, width: int | None = None) -> torch.Tensor | None:
        """Which node sees which, see `TokenTree.ancestor_mask`."""
        return self.tree.ancestor_mask(width)


class PassBatch(NamedTuple):
    """What a pass runs, the tokens of all sequences in a row.

    Attributes:
        sequences: the new tokens of each sequence, with its cache, to which their keys and values are written.
        logits: whether the language-model head runs, too.
        observed: of how many tokens, from the last one on, queries are returned.
    """

    sequences: Sequence[Chain | Tree]
    logits: bool
    observed: int = 0


class PassOutput(NamedTuple):
    """What a pass over T tokens returns. Where passes are recorded, another pass overwrites it.

    Attributes:
        hidden: the hidden states before the final norm, [T, d].
        logits: of the token that follows each, [T, V]; without rows, of the decoder alone.
        queries: by layer, the queries [1, H, n, D] of the last n tokens; empty unless they were asked for.
        features: the inputs of the layers that a draft model reads, joined [T, layers x d]; None if it reads
            none.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    queries: Mapping[int, torch.Tensor]
    features: torch.Tensor | None

    def part(self, rows: slice) -> "PassOutput":
        """The outputs of some tokens, with their queries where those of all were asked for."""
        queries = {layer: query[:, :, rows] for layer, query in self.queries.items()}
        features = None if self.features is None else self.features[rows]
        return PassOutput(self.hidden[rows], self.logits[rows], queries, features)

    def first(self, count: int) -> "PassOutput":
        """The outputs of the first ``count`` tokens, behind which stands padding."""
        padding = len(self.hidden) - count
        queries = {layer: query[:, :, : query.shape[2] - padding] for layer, query in self.queries.items()}
        return self.part(slice(0, count))._replace(queries=queries) if padding else self

    @staticmethod
    def joined(outputs: Sequence["PassOutput"]) -> "PassOutput":
        """The outputs of several sequences in a row, copied."""
        hidden, logits, queries, features = zip(*outputs, strict=True)
        by_layer = {layer: torch.cat([one[layer] for one in queries], 2) for layer in queries[0]}
        joined = None if features[0] is None else torch.cat(features)
        return PassOutput(torch.cat(hidden), torch.cat(logits), by_layer, joined)


class PassRule(NamedTuple):
    """What every pass must obey so that the bits of its rows are independent of each other.

    Attributes:
        width: the number of tokens that a pass has with its padding; None if it may have any. Prompts are split and
            trees pruned.
        chunk: a multiple of ``width`` that a piece of a prompt may have, None if there is none.
    """

    width: int | None = None
    chunk: int | None = None

    def padding(self, count: int) -> int:
        """How many tokens are added to a pass of ``count``."""
        return 0 if self.width is None else -count % self.width

    def borders(self, count: int, size: int) -> list[int]:
        """Where a prompt of ``count`` tokens is cut, both ends included; into pieces of about ``size`` if that is free.

        Shorter pieces come first, so that the last one has all queries that are observed.
        """
        most = self.width or size
        chunk = self.chunk or most
        rest = count % chunk
        short = range(rest % most or most, rest, most)
        return [*([0, *short] if rest else []), *range(rest, count + 1, chunk)]


FREE = PassRule()
"""The rule that asks for nothing."""

DEEPEST = 64
"""The engine cuts trees here: no node is deeper below its root."""


class PassBackend(Protocol):
    """Runs all passes of one model on its device, from the first to the last operation.

    Attributes:
        name: as the report has it.
        covers: what it does for this model, in words.
        called: the forwards of modules that drafters call outside of passes: final norm, head, those of draft heads.
        warm_up_runs: how often a pass of one shape is run until it runs as it always will.
        flattens: whether several sequences are run in one pass, and not each in its own; None until that is tried.
        fault: what has failed while it ran; None if nothing has.
    """

    name: ClassVar[str]
    warm_up_runs: ClassVar[int] = 1
    flattens: bool | None = None
    called: Forwards

    @property
    def covers(self) -> str: ...

    @property
    def fault(self) -> str | None:
        return None

    def renewing(self) -> Work[None]:
        """Take in the weights and layers as they are now, in parts.

        Raises:
            BackendFault: it cannot run the model.
        """

    def prepare(self, cache: "LayeredCache", count: int) -> None:
        """Make a cache ready for ``count`` new tokens.

        Raises:
            ValueError: there is no room for them.
        """

    def run(self, batch: PassBatch) -> PassOutput:
        """Run the new tokens of all sequences. Another pass may overwrite the outputs."""

    def width(self, nodes: int) -> int:
        """How many rows a verification of ``nodes`` nodes computes, and how many cache slots it writes."""
        return nodes

    def rule(self, demanded: bool) -> tuple[PassRule | None, str]:
        """The rule under which its bits depend on nothing but a token's sequence, and what it says in words.

        Without one, why there is none. ``demanded`` is whether the user insists.
        """

    def computed_by(self) -> str:
        """What its bits depend on beside the model, its dtype and the number of threads, to compare two runs by."""

    def choice(self, params: "SamplingParams", bias: torch.Tensor | None = None) -> "NativeChoice | None":
        """What chooses tokens faster than the sampler's own operators, and chooses the same; None if nothing does.

        ``bias`` is what these parameters add to logits, float64 [V].
        """
        return None

    def levels(self, heads: nn.Module, vocabulary: "DraftVocabulary") -> "NativeLevels | None":
        """What fills all levels of these draft heads at once; None if nothing does."""
        return None


class BackendFault(Exception):
    """A backend cannot run a model, for the reason given in words."""
