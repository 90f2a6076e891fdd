"""Drafting with a small model of the same vocabulary, which most people mean by speculative decoding."""

from collections.abc import Callable
from typing import ClassVar

from decoder.cache.full import FullCache
from decoder.drafters.base import DrafterContext
from decoder.drafters.fixed_tree import FixedTree
from decoder.drafters.levels import LevelsWanted
from decoder.drafters.model_levels import DraftModelLevels
from decoder.drafters.tuning.cost_tuned import CostTuned
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import rank_paths


class DraftModel(FixedTree):
    """Drafts a chain of the small model's best tokens, as deep as ``options.tree``, and beside it what the tree allows.

    With coupling (arXiv 2408.07978) the small model's tokens are chosen with the noise of the target's own. The
    candidates of a depth stand behind the best one of the depth before, since each pass of the small model reads one
    token: of the tree (2, 3) those are 2 and 3 candidates, and not 2 and 6.
    """

    source: ClassVar[str] = DraftModelLevels.source

    def __init__(self, context: DrafterContext) -> None:
        _refuse_missing(context)
        paths = rank_paths(context.options.fixed_tree, context.max_new_tokens)
        super().__init__([path for path in paths if not any(path[:-1])])
        self.levels = DraftModelLevels(context, self.width)

    def prompt_reader(self) -> Callable[[int], None]:
        return self.levels.read_prompt

    def wants_levels(self, cache: FullCache, sampler: Sampler, depth: int) -> LevelsWanted | None:
        count, state = min(self.depth, depth), self.levels.state_behind(cache, sampler)
        if not count or state is None:
            return None
        return LevelsWanted(self.levels, state, sampler, count, False, self._take_levels)


class TunedDraftModel(CostTuned):
    """`DraftModel` where no tree is given: a chain as long, with as many nodes beside it, as pays in each step.

    Behind each of its passes it is asked whether another one is worth its time, by how likely the chain is right so
    far. Where none is, the text is decoded plainly.
    """

    heads_kinds: ClassVar[tuple[str, ...]] = ()
    takes_draft_model: ClassVar[bool] = True

    def __init__(self, context: DrafterContext) -> None:
        _refuse_missing(context)
        super().__init__(context)


def _refuse_missing(context: DrafterContext) -> None:
    if context.draft_model is None:
        raise ValueError("method 'draft-model' needs a small model with the same vocabulary: give draft_model=")
    positions = context.draft_model.model.config.max_position_embeddings
    if positions < len(context.prompt):
        raise ValueError(
            f"the draft model has {positions} positions, too few for the {len(context.prompt)} tokens of the prompt: "
            "shorten it, or take another draft model or method"
        )
