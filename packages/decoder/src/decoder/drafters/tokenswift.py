"""TokenSwift (paper section 3): one draft pass with a partial cache and a few heads, plus n-grams of the sequence."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from decoder.backends.base import PassOutput
from decoder.cache.full import FullCache
from decoder.cache.partial import PartialCache
from decoder.draft_heads import KINDS
from decoder.drafters.base import DrafterContext
from decoder.drafters.fixed_tree import FixedTree
from decoder.drafters.levels import HeadLevels, Level, LevelsWanted
from decoder.drafters.retrieval.ngram_table import NgramTable
from decoder.drafters.retrieval.taking_in import taking_in
from decoder.drafters.tuning.cost_tuned import CostTuned
from decoder.drafters.tuning.level_policy import Average, LevelPolicy
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree, rank_paths
from decoder.sampling.tree_draws import TreeDraws
from decoder.stats import Statistics
from decoder.work import Work

_TURN = 64  # steps in which drafting with or without a draft pass is tried, and finds its number of levels
_TURNS = 16  # turns of so many steps, of which each of the two gets one to be tried
_TIMED = 4  # draft passes from which on their time is known
_MARGIN = 1.1  # how much better it must look to be tried: neither the pass nor heads behind it are always right
_FIRST_GUESS = 0.3  # how likely the best of what a sequence has repeated is right, before any was seen


class _Grams:
    """The n-grams of a sequence, gamma + 1 tokens each; ``k`` of them are retrieved per step."""

    def __init__(self, context: DrafterContext):
        gram = context.heads.num_heads + 1
        # A sequence has no more n-grams than tokens.
        self.k = min(context.options.retrieved_ngrams, context.longest_text)
        self.nodes = self.k * gram
        self._table = NgramTable(gram)
        self._prompt = context.prompt
        self._delay = context.sampling.window if context.options.ngram_delay else 0
        self._waiting: deque[int] = deque()

    def taking_in_prompt(self) -> Work[None]:
        return taking_in(self._table, self._prompt)

    def behind(self, candidates: Sequence[int]) -> list[tuple[int, ...]]:
        """The most frequent ones that begin with the best candidate for the next token."""
        return self._table.most_frequent(candidates[0], self.k) if candidates else []

    def extend(self, tokens: Sequence[int]) -> None:
        self._waiting += tokens
        self._table.extend([self._waiting.popleft() for _ in range(len(self._waiting) - self._delay)])


class _DraftPass:
    """The first of a step's two passes: the target itself over the newest token, with its partial cache."""

    def __init__(self, context: DrafterContext):
        self._target, options = context.target, context.options
        self.partial = (
            None
            if options.cache == "full"
            else PartialCache(context.budget, options.sink, dynamic=options.cache == "dynamic")
        )

    def hidden(self, cache: FullCache, sampler: Sampler) -> torch.Tensor:
        """The newest token's state before the final norm, [1, d]."""
        attended = cache if self.partial is None else self.partial
        # The passes of other sequences, which come before the heads', may write over it.
        return self._target.draft([sampler.context[-1]], cache.length, attended).clone()

    def commit(self, cache: FullCache, queries: Mapping[int, torch.Tensor], newest: int = -1) -> None:
        """Take in what ``cache`` has committed; ``queries`` as for `PartialCache.append`."""
        if self.partial is not None and cache.length:
            self.partial.append(cache, queries, newest)

    def shorter(self, length: int) -> bool:
        """Whether it attends to less than a sequence of this ``length``."""
        return self.partial is not None and length > self.partial.budget

    @property
    def rebuilds(self) -> int:
        return 0 if self.partial is None else self.partial.rebuilds


class TokenSwift(FixedTree):
    """Drafts gamma + 1 distributions in one pass of the target itself, and a tree of their best tokens.

    The tree is fixed, as the paper has it; `TunedTokenSwift` chooses one in each step.
    """

    heads_kinds: ClassVar[tuple[str, ...]] = KINDS
    needs_heads: ClassVar[bool] = True
    observed_queries = 1  # the importance of a pair is for the newest token

    def __init__(self, context: DrafterContext) -> None:
        options, heads = context.options, context.heads
        super().__init__(rank_paths(options.fixed_tree, min(heads.num_heads + 1, context.max_new_tokens)))
        self.heads = HeadLevels(context.target, heads, options.coupled, self.width)
        self.draft_pass, self.grams = _DraftPass(context), _Grams(context)
        self.max_nodes += self.grams.nodes

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> Work[None]:
        self.draft_pass.commit(cache, queries)
        return self.grams.taking_in_prompt()

    def wants_levels(self, cache: FullCache, sampler: Sampler, depth: int) -> LevelsWanted:
        hidden = self.draft_pass.hidden(cache, sampler)
        return LevelsWanted(self.heads, hidden, sampler, self.depth, True, self._take_levels)

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        assert self._candidates is not None  # levels were wanted
        grams = self.grams.behind(self._candidates[0])
        tree = super().propose(cache, sampler, depth)
        for gram in grams:
            tree.add_path(gram, "ngrams")
        return tree

    def commit(self, cache: FullCache, verification: PassOutput, path: list[int], tokens: list[int]) -> None:
        self.grams.extend(tokens)
        self.draft_pass.commit(cache, verification.queries, path[-1])

    def finish(self, statistics: Statistics) -> None:
        statistics.cache_rebuilds += self.draft_pass.rebuilds


class TunedTokenSwift(CostTuned):
    """`TokenSwift` where no tree is given: of its candidates those that pay here, and a draft pass only where it pays.

    Without the draft pass the heads draft from the state that the last verification has left. A sequence that the
    partial cache could hold as a whole gets none: it would take as long as a plain step.
    """

    heads_kinds: ClassVar[tuple[str, ...]] = TokenSwift.heads_kinds
    needs_heads: ClassVar[bool] = True

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.draft_pass, self.grams = _DraftPass(context), _Grams(context)
        self._pass_seconds: Average = context.tuning_state.setdefault("draft pass", Average())
        self._current = False  # whether the partial cache holds what the full one has
        self.observed_queries = 1

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> Work[None]:
        if self.draft_pass.shorter(cache.length):
            self.draft_pass.commit(cache, queries)
            self._current = True
        yield from self.grams.taking_in_prompt()
        yield from super().start(cache, queries) or ()

    def wants_levels(self, cache: FullCache, sampler: Sampler, depth: int) -> LevelsWanted | None:
        # It is brought up to date in a step, for the next one, and not at all while draft passes do not pay.
        keep = self.draft_pass.shorter(cache.length + self.max_nodes) and self._own_level_pays()
        self._own_level = keep and self._current and self.draft_pass.shorter(cache.length)
        self.observed_queries = int(keep)
        return super().wants_levels(cache, sampler, depth)

    def _own_level_pays(self) -> bool:
        """Whether to draft with a draft pass: it is tried behind heads alone at first, and again now and then."""
        sequences = self.context.running()
        without, with_pass = (self._level_policy(sequences, own_level) for own_level in (False, True))
        turn = (without.steps + with_pass.steps) // _TURN % _TURNS
        if turn == 0:
            self._pass_seconds.forget()  # it is measured anew, since a machine changes its speed
            return False
        if turn == 1:
            return self._own_level_could_pay(without)
        # Steps without levels are the same in both; then heads alone, which cost less to try, may soon pay again.
        return with_pass.best > 0 and with_pass.rate(with_pass.best) > without.rate(without.best)

    def _own_level_could_pay(self, without: LevelPolicy) -> bool:
        """Whether it would if its first token were always right, and heads behind it as good as without it."""
        # Where the host does not wait for the device, a draft pass has no time of its own.
        if self.context.target.draws_whole_trees or self._pass_seconds.seen < _TIMED:
            return True
        tokens, seconds = without.tokens(0, without.best), without.seconds(without.best)
        return (1 + tokens) * seconds > _MARGIN * tokens * (seconds + self._pass_seconds.value)

    def _state(self, cache: FullCache, sampler: Sampler) -> torch.Tensor | None:
        if not self._own_level:
            return super()._state(cache, sampler)
        start = time.perf_counter()
        state = self.draft_pass.hidden(cache, sampler)
        self._pass_seconds.observe(self.context.target.ranks.agree(time.perf_counter() - start))
        return state

    def _offer_level(self, depth: int, level: Level, before: list[int | None]) -> list[int | None]:
        nodes = super()._offer_level(depth, level, before)
        if depth or nodes[0] is None:
            return nodes
        for rank, gram in enumerate(self.grams.behind([token for token, _ in level.rows[0]])):
            # All of them begin with the best candidate, which the heads know better.
            node: int | None = self._tree.add(0, gram[0], "ngrams")
            for place, token in enumerate(gram[1:], start=1):
                node = self._candidates.offer(node, token, ("ngrams", place, rank), _FIRST_GUESS / (1 + rank))
                if node is None:
                    break
        return nodes

    def draft_ahead(self, verification: PassOutput, draws: TreeDraws) -> None:
        """Nothing: where the draft pass stands, the host must know."""

    def _take_in(self, cache: FullCache, verification: PassOutput, path: list[int], tokens: list[int]) -> None:
        self.grams.extend(tokens)
        self._current = bool(self.observed_queries) and self.draft_pass.shorter(cache.length)
        if self._current:
            self.draft_pass.commit(cache, verification.queries, path[-1])

    def finish(self, statistics: Statistics) -> None:
        statistics.cache_rebuilds += self.draft_pass.rebuilds
