"""Medusa* of the paper's Table 3: heads on the verification's own hidden state, same tree, no draft pass."""

from typing import ClassVar

from decoder.assistant.model import AssistantModel
from decoder.backends.base import PassOutput
from decoder.cache.full import FullCache
from decoder.draft_heads import KINDS
from decoder.draft_layer import RepeatedLayer
from decoder.drafters.base import DeferredRead, DrafterContext
from decoder.drafters.block_levels import make_levels
from decoder.drafters.fixed_tree import FixedTree
from decoder.drafters.layer_levels import LayerLevels
from decoder.drafters.levels import LevelsWanted
from decoder.drafters.tuning.cost_tuned import CostTuned
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import rank_paths
from decoder.sampling.tree_draws import TreeDraws


class Medusa(FixedTree):
    """Drafts from the hidden state of the last accepted node, which the verification has computed anyway.

    That node is at the position before the newest token, whose own hidden state is not known yet; it is the root of
    the next tree. Head i (from 1) predicts the token i + 1 positions after its hidden state, so head 1 fills the
    tree's first level. The first step has nothing to draft from and verifies the root alone.
    """

    heads_kinds: ClassVar[tuple[str, ...]] = (*reversed(KINDS), "mtp", "assistant", "dflash")
    needs_heads: ClassVar[bool] = True

    def __init__(self, context: DrafterContext) -> None:
        levels = context.max_new_tokens  # a layer that is repeated fills any number of them
        if not isinstance(context.heads, RepeatedLayer | AssistantModel):
            levels = min(levels, context.heads.num_heads)
        super().__init__(rank_paths(context.options.fixed_tree, levels))
        self.heads = make_levels(context, self.width)

    @property
    def feature_reader(self) -> LayerLevels | None:
        return self.heads if isinstance(self.heads, LayerLevels) else None

    def wants_levels(self, cache: FullCache, sampler: Sampler, depth: int) -> LevelsWanted | None:
        if self._candidates is not None or (state := self.heads.state_behind(cache, sampler)) is None:
            return None
        return LevelsWanted(self.heads, state, sampler, self.depth, False, self._take_levels)

    def draft_ahead(self, verification: PassOutput, draws: TreeDraws) -> DeferredRead | None:
        if not self.heads.drafts_ahead:
            return None
        hidden = verification.hidden.index_select(0, draws.last_node)
        numbers = self.heads.ask(hidden, draws.sampler, draws.draft_context, self.depth)
        return DeferredRead(numbers, lambda read: self._take_levels(self.heads.read(read)))

    def commit(self, cache: FullCache, verification: PassOutput, path: list[int], tokens: list[int]) -> None:
        self.heads.follow(verification, path, tokens)


class TunedMedusa(CostTuned):
    """`Medusa` where no tree is given: of its heads' candidates those that pay on this machine."""

    heads_kinds: ClassVar[tuple[str, ...]] = Medusa.heads_kinds
    needs_heads: ClassVar[bool] = True
