"""What a drafter is: an object that proposes token trees. Nothing that it does can change the text."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch

from decoder.backends.base import PassOutput
from decoder.cache.draft_layer import KeptEntries
from decoder.cache.full import FullCache
from decoder.draft_layer import DraftLayer
from decoder.drafters.levels import LevelsWanted
from decoder.drafters.tuning.verify_costs import VerifyCosts
from decoder.heads import Heads
from decoder.model.target import Target
from decoder.options import TokenSwiftOptions
from decoder.sampling.params import SamplingParams
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree
from decoder.sampling.tree_draws import TreeDraws
from decoder.stats import Statistics
from decoder.work import Work


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter is given for one text: the models, the settings, and state that outlives the text.

    Attributes:
        target: the model that is decoded. The engine has patched it whenever it calls `start` or `propose`.
        heads: the draft heads of the first of the drafter's `heads_kinds` that the user gave; None if there are none.
        draft_model: the small model, which the drafter has to patch itself; None if the user gave none.
        sampling: how the target's tokens are chosen.
        options: the user's settings for drafters.
        prompt: the prompt's token ids.
        costs: how long verifications take on this machine, measured when first asked for.
        max_new_tokens: how many tokens are generated at most, so that a deeper tree is of no use.
        tuning_state: a dictionary that is shared by all sequences with the same method and sampling, one after another
            or at once. A drafter finds there, by keys of its own, what it has stored for earlier sequences.
        running: returns how many sequences are decoded together at the moment, this one included.
    """

    target: Target
    heads: Heads | None
    draft_model: Target | None
    sampling: SamplingParams
    options: TokenSwiftOptions
    prompt: list[int]
    costs: VerifyCosts
    max_new_tokens: int
    tuning_state: dict[Hashable, Any]
    running: Callable[[], int] = lambda: 1

    @property
    def longest_text(self) -> int:
        """How many tokens prompt and output have at most."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def budget(self) -> int:
        """How many slots the partial cache gets: `TokenSwiftOptions.budget`, but no more than the sequence can fill."""
        return self._usable(self.options.budget_for(len(self.prompt)))

    @property
    def draft_budget(self) -> int:
        """How many slots the small model's cache gets: `TokenSwiftOptions.draft_budget`, limited likewise."""
        wanted = self.options.draft_budget
        return self.budget if wanted is None else self._usable(wanted)

    def _usable(self, slots: int) -> int:
        """No more ``slots`` than the longest sequence fills, but more than those of the sink."""
        return min(slots, max(self.longest_text, self.options.sink + 1))


class Drafter(Protocol):
    """Where drafts come from: it proposes a tree of candidates for each step, and is told which were accepted.

    A new method is a class with these members in a file of its own, a line in
    `decoder.drafters.METHODS`, and its name in `decoder.options.METHOD_NAMES`. It may inherit members that do nothing
    from this one.
    """

    heads_kinds: ClassVar[tuple[str, ...]] = ()
    """Kinds of draft heads that it can run with, the preferred one first; empty if it uses none."""

    needs_heads: ClassVar[bool] = False
    """Whether it cannot run without heads."""

    observed_queries: int = 0
    """How many of the prompt's last queries `start` needs. If any, `commit` also finds those of the verification."""

    max_nodes: int
    """How many nodes its trees have at most, root included; the full cache reserves that much room."""

    def __init__(self, context: DrafterContext) -> None:
        """Raises ValueError, in one sentence, if ``context`` lacks what the method needs."""

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> Work[None] | None:
        """Called once, when the prompt except for its last token has been committed to ``cache``.

        What takes long, as reading the prompt with a model of its own does, is returned as work: it is done in parts
        before the first step, while other sequences take theirs. The target is patched in each part.

        ``queries`` are, by layer, the queries [1, H, T, D] of the last T committed tokens, with T up to
        `observed_queries`; the mapping is empty if no token is committed.
        """
        return None

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        """A tree of candidates for what follows the sequence.

        Its root is the sequence's newest token, ``sampler.context[-1]``, whose entries are not in ``cache`` yet. The
        engine removes nodes deeper than ``depth``, and no draft pass may read positions beyond that depth, either.
        """

    def commit(self, cache: FullCache, verification: PassOutput, path: list[int], tokens: list[int]) -> None:
        """Called after each step: ``path`` (root first) is in ``cache`` now, ``tokens`` were added to the sequence."""
        return

    def finish(self, statistics: Statistics) -> None:
        """Called once, when the sequence ends or is preempted, which may be before `start`.

        Add to the statistics what only the drafter has counted. A preempted sequence goes on with a new drafter.
        """
        return


class DeferredRead(NamedTuple):
    """Results on the device that the host will read later, together with others, so that it waits only once.

    Attributes:
        numbers: a vector on the device.
        receive: called with the values of ``numbers`` when the host has read them.
    """

    numbers: torch.Tensor
    receive: Callable[[list[float]], None]


@runtime_checkable
class WorksBetweenSteps(Protocol):
    """A `Drafter` that may have to do between two steps what takes longer than one."""

    def long_work(self, cache: FullCache) -> Work[None] | None:
        """Asked before each step, which waits for this work; other sequences take theirs between two parts of it.

        It may be dropped behind any part, where the sequence is cancelled or preempted, and must leave ``cache`` then
        as it was. The target is patched in each part.
        """


@runtime_checkable
class WantsLevels(Protocol):
    """A `Drafter` that drafts from levels of heads, which are filled together with those of other sequences."""

    def wants_levels(self, cache: FullCache, sampler: Sampler, depth: int) -> LevelsWanted | None:
        """Called with the arguments of `propose`, which follows; None where no levels are wanted in this step."""


@runtime_checkable
class DraftsAhead(Protocol):
    """A `Drafter` that can draft ahead: for the next step, before the host has read how this one ended.

    On CUDA the host then waits once in a step, for this step's tokens and the next step's drafts together.
    """

    def draft_ahead(self, verification: PassOutput, draws: TreeDraws) -> DeferredRead | None:
        """Launch what the next `propose` needs, behind the end of the walk (``draws``), which only the device knows.

        The host must not wait for the device here. The deferred read is received before `commit`, and it may turn out
        that the sequence has ended earlier. If this was not called, on a CPU for instance, `propose` must do without
        it.
        """


@runtime_checkable
class ReadsPrompt(Protocol):
    """A `Drafter` that reads the prompt by itself, in parts, so that other sequences can take a step in between."""

    def prompt_reader(self) -> Callable[[int], None] | None:
        """What is called behind each part of the prompt, before `start`; None where nothing is to be called.

        It is given how many tokens of the prompt are to be read by now, of those that are committed or soon will be.
        """


class FeatureReader(Protocol):
    """Reads what the target computes of the prompt; later tokens' comes with verifications."""

    heads: DraftLayer

    def begin_with(self, kept: KeptEntries | None, count: int) -> None:
        """Called first where the first ``count`` tokens are taken over from an earlier sequence, whose entries were
        kept; None begins anew."""

    def read_features(self, output: PassOutput) -> None:
        """Called before `start` with the output of the pass over each chunk of committed prompt tokens in turn."""

    def kept(self, count: int) -> KeptEntries | None:
        """What `begin_with` takes, of at most the first ``count`` tokens of the sequence; None if there is nothing."""


@runtime_checkable
class ReadsFeatures(Protocol):
    """A `Drafter` that may have a `FeatureReader`."""

    @property
    def feature_reader(self) -> FeatureReader | None:
        """None where nothing is to be read."""


def feature_reader(drafter: Drafter) -> FeatureReader | None:
    """That of a drafter, if it has one."""
    return drafter.feature_reader if isinstance(drafter, ReadsFeatures) else None
