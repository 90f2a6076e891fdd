"""What a drafter is: anything that proposes a tree. Nothing it does can change the text."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch

from decoder.cache.full import FullCache
from decoder.draft_heads import DraftHeads
from decoder.drafters.levels import LevelsWanted
from decoder.drafters.tuning.verify_costs import VerifyCosts
from decoder.model.target import Target
from decoder.model.verification import Verification
from decoder.options import TokenSwiftOptions
from decoder.sampling.params import SamplingParams
from decoder.sampling.sampler import Sampler, TreeDraws
from decoder.sampling.token_tree import TokenTree
from decoder.stats import Statistics


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may draw on for one generation.

    Attributes:
        target: the model itself, patched by the engine whenever the drafter proposes or starts.
        heads: draft heads of the first of its `Drafter.heads_kinds` at hand; None when there are none.
        draft_model: the small model, which the drafter patches itself; None when the user gave none.
        sampling: how the target's tokens are chosen.
        options: the user's settings of the drafters.
        prompt: its token ids.
        costs: what verifications cost here, measured when first asked for.
        max_new_tokens: tokens to generate at most; a deeper tree is of no use.
        tuning_state: what earlier generations with the same method and sampling have taught it, by names of the
            drafter's own, and where it leaves what this one teaches; empty at first.
        running: how many texts are decoded together at the moment, this one among them.
    """

    target: Target
    heads: DraftHeads | None
    draft_model: Target | None
    sampling: SamplingParams
    options: TokenSwiftOptions
    prompt: list[int]
    costs: VerifyCosts
    max_new_tokens: int
    tuning_state: dict[Hashable, object]
    running: Callable[[], int] = lambda: 1

    @property
    def longest_text(self) -> int:
        return len(self.prompt) + self.max_new_tokens

    @property
    def budget(self) -> int:
        """Slots of the partial cache, no more than the text can fill."""
        wanted = self.options.budget_for(len(self.prompt))
        return min(wanted, max(self.longest_text, self.options.sink + 1))

    @property
    def draft_budget(self) -> int:
        """Slots of the small model's cache, no more than the text can fill."""
        wanted = self.options.draft_budget
        return self.budget if wanted is None else min(wanted, max(self.longest_text, self.options.sink + 1))


class Drafter(Protocol):
    """Proposes candidates, and learns what became of them.

    A new method is a class with these members in a file of its own, and a line in `decoder.drafters.METHODS`.
    """

    heads_kinds: ClassVar[tuple[str, ...]]
    """Kinds of draft heads it can run with, the preferred one first; empty when it uses none."""

    needs_heads: ClassVar[bool]
    """Whether it is of no use without them."""

    observed_queries: int
    """How many of the prompt's last queries `start` reads; where any, `commit` finds the verification's. 0 for none."""

    max_nodes: int
    """The widest tree it may propose, root included; the full cache keeps that much room."""

    def __init__(self, context: DrafterContext) -> None:
        """Raises ValueError, in one sentence, when ``context`` lacks what the method needs."""

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> None:
        """The prompt but its last token is committed.

        ``queries`` are those of its last tokens, per layer [1, H, T, D]: T of them, up to `observed_queries`; without
        any committed token the mapping is empty.
        """

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        """Candidates below the newest committed token, ``sampler.context[-1]``, which ``cache`` does not hold yet.

        What lies deeper than ``depth`` tokens is cut off by the engine; a draft pass must not look further either.
        """

    def commit(self, cache: FullCache, verification: Verification, path: list[int], tokens: list[int]) -> None:
        """``path`` (the root first) is now in ``cache``; ``tokens`` were added to the text."""

    def finish(self, statistics: Statistics) -> None:
        """Add what only the drafter knows."""


class DeferredRead(NamedTuple):
    """Numbers that the device was asked for, to be read together with others, so that the host waits once.

    Attributes:
        numbers: a vector on the device.
        receive: called with their values once the host has them.
    """

    numbers: torch.Tensor
    receive: Callable[[list[float]], None]


@runtime_checkable
class WantsLevels(Protocol):
    """A `Drafter` whose levels of heads may be filled with those of other texts; `propose` fills them where they were
    not."""

    def wants_levels(self, cache: FullCache, sampler: Sampler, depth: int) -> LevelsWanted | None:
        """Called with the arguments of `propose` and right before it; None where no levels are wanted in this step."""


@runtime_checkable
class DraftsAhead(Protocol):
    """A `Drafter` that need not know how a step ended to draft for the next: on CUDA it then saves a read per step."""

    def draft_ahead(self, verification: Verification, draws: TreeDraws) -> DeferredRead | None:
        """Ask the device for what `propose` needs next, behind the end of the walk, which only the device knows.

        The host should not wait for the device here. The text may turn out to have ended before. What is read is
        received before `commit`; `propose` must do without where this was not called.
        """
