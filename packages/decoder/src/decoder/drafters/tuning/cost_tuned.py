"""Trees that earn their cost: from what the text's suffixes and heads offer, the nodes that raise tokens per second."""

import time
from collections.abc import Mapping

import torch

from decoder.cache.full import FullCache
from decoder.drafters.base import DeferredRead, DrafterContext
from decoder.drafters.levels import HeadLevels, Level
from decoder.drafters.retrieval.suffix_index import SuffixIndex
from decoder.drafters.tuning.acceptance_estimate import AcceptanceEstimate
from decoder.drafters.tuning.candidate_tree import CandidateTree
from decoder.drafters.tuning.level_policy import LevelPolicy, step_seconds
from decoder.drafters.tuning.verify_costs import WIDEST
from decoder.model.verification import Verification
from decoder.sampling.sampler import Sampler, TreeDraws
from decoder.sampling.token_tree import TokenTree
from decoder.stats import Statistics

_FEWEST = 16  # new tokens from which on it pays to measure costs
_DEEPEST = 8  # levels of conditioned heads at most
_WIDTH = 6  # candidates per branch of a level of heads
_BEAM = 4  # branches of a level that the next one goes on from
_FAR = 4.0  # in score: what trails the best candidate by more is hardly ever right
_LONGEST = 32  # tokens of a suffix, and of a chain behind it


class CostTuned:
    """Verifies, of all candidates of a step, as many of the likeliest as make its tokens per second highest.

    The text is given, so what counts is how long each place of it takes: a token that is hard to draft is worth a step
    of plain decoding, however fast other places go by. Candidates come from suffixes of the text, for nothing, and from
    draft heads, of which a `LevelPolicy` says how many levels to run. What one text teaches serves the next.
    """

    needs_heads = False
    observed_queries = 0
    max_nodes = WIDEST

    def __init__(self, context: DrafterContext) -> None:
        if context.options.verification != "exact":
            raise ValueError(
                "cost-tuned trees (methods auto and suffix) follow the clock, and so would the text of "
                f"{context.options.verification} verification: take another method, or exact verification"
            )
        self.context, self.heads, self._most_levels = context, None, 0
        if context.heads is not None:
            self.heads = HeadLevels(context.target, context.heads, context.options.coupled, _WIDTH, _BEAM)
            self._most_levels = _DEEPEST if context.heads.conditioned else context.heads.num_heads
        self.index = SuffixIndex(_LONGEST)
        self.index.extend(context.prompt)
        self._estimate: AcceptanceEstimate = context.tuning_state.setdefault("acceptance", AcceptanceEstimate())
        self._hidden: torch.Tensor | None = None  # of the last accepted node
        self._ahead: list[Level] | None = None  # levels that were drafted ahead of this step
        self._policy, self._costs = LevelPolicy(0), [0.0]
        self._candidates: CandidateTree | None = None
        self._chosen: list[int] = []  # the candidates that are nodes of the tree
        self._levels = 0  # of heads that were run
        self._start = self._drafting = 0.0  # when it began, and seconds spent on drafts

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> None:
        if self.context.max_new_tokens >= _FEWEST:
            self.context.costs.at(cache)

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        self._tree = TokenTree(sampler.context[-1])
        if self.context.max_new_tokens < _FEWEST:
            return self._tree
        self._start, texts = time.perf_counter(), self.context.running()
        self._costs = costs = self.context.costs.at(cache, texts)
        # Heads that pay for one text may not pay for many, whose verification is one pass.
        key = "levels", self._most_levels, texts.bit_length()
        self._policy = self.context.tuning_state.setdefault(key, LevelPolicy(self._most_levels))
        # Half as likely as pays for a node at the rate of plain decoding.
        floor = 0.5 * (costs[WIDEST] - costs[1]) / (WIDEST - 1) / costs[1]
        self._candidates = CandidateTree(self._tree, depth, floor, self._estimate)
        self._offer_suffix()
        levels = self._head_levels(sampler) if depth else []
        self._levels = len(levels)
        if levels:
            self._offer_levels(levels)
            self._candidates.weigh_agreement()
        self._chosen = self._candidates.likeliest()[: self._best(self._levels)[0]]
        self._tree.select(self._chosen)
        self._drafting = time.perf_counter() - self._start
        return self._tree

    def _best(self, levels: int) -> tuple[int, float]:
        """How many candidates to verify where so many levels were run, and the tokens per second that this gives."""
        overhead, tokens, best = self._policy.overhead(levels), 0.0, (1, 0.0)
        for nodes, node in enumerate(self._candidates.likeliest()[:WIDEST], start=1):
            tokens += self._candidates.chances[node]
            rate = tokens / step_seconds(self._costs[nodes], overhead)
            if rate > best[1]:
                best = nodes, rate
        return best

    def _offer_suffix(self) -> None:
        """The chain that most often followed the longest suffix seen before, and what else followed on its way."""
        node, (length, _) = 0, self.index.match()
        for level in self.index.continuations(_LONGEST):
            nodes = []
            for token, share in level:
                kind = "suffix", min(length, _LONGEST).bit_length(), int(5 * share)
                # The longer the suffix, the likelier: 1 to 1 behind one token that was followed once.
                prior = share * (length + 1) / (2 + share * (length - 1))
                nodes.append(self._candidates.offer(node, token, kind, prior))
            if (node := nodes[0]) is None:
                return
            length += 1

    def _head_levels(self, sampler: Sampler) -> list[Level]:
        """What heads offer in this step: what was drafted ahead, else the policy's levels where they pay."""
        ahead, self._ahead, policy = self._ahead, None, self._policy
        if ahead is not None or not policy.levels or self._hidden is None:
            return ahead or []
        tree, chances = self._tree, self._candidates.chances
        covered = sum(chances[node] for node in range(1, len(tree)) if not tree.parents[node])
        if covered:
            seconds = policy.seconds(policy.levels, self._costs) - policy.seconds(0, self._costs)
            if (1 - covered) * policy.gain(policy.levels) < self._best(0)[1] * seconds:
                return []
        return self.heads.levels(self._hidden, sampler, policy.levels)

    def _offer_levels(self, levels: list[Level]) -> None:
        nodes: list[int | None] = [0]
        for depth, level in enumerate(levels):
            if level.parents is None:
                known = [node for node in nodes if node is not None]
                parents = [sorted(known, key=self._candidates.chances.__getitem__, reverse=True)[:_BEAM]]
            else:
                parents = [[nodes[place]] for place in level.parents]
            nodes = []
            for row, behind in zip(level.rows, parents, strict=True):
                for parent in behind:
                    nodes += self._offer_row(parent, depth, row)

    def _offer_row(self, parent: int | None, depth: int, row: list[tuple[int, float]]) -> list[int | None]:
        """The tokens of one row, told apart by rank and by the margin to the best of the others; their nodes."""
        nodes: list[int | None] = []
        for rank, (token, score) in enumerate(row if parent is not None else ()):
            # Behind a filter that leaves one token there is no rival.
            margin = min(_FAR, score - row[rank == 0][1]) if len(row) > 1 else _FAR
            if not (score > -torch.inf and margin >= -_FAR):
                break
            kind, prior = (rank, int(2 * margin)), 0.5 / (1 + rank) ** 2
            if depth:
                prior = self._estimate.rate(("heads", depth - 1, *kind), prior)
            nodes.append(self._candidates.offer(parent, token, ("heads", depth, *kind), prior))
        return nodes + [None] * (len(row) - len(nodes))

    def draft_ahead(self, verification: Verification, draws: TreeDraws) -> DeferredRead | None:
        # The next step is taken to be like this one: where its suffix made heads needless, the next one's does.
        if not self._policy.levels or (self._hidden is not None and not self._levels):
            return None
        start = time.perf_counter()
        hidden = verification.hidden.index_select(0, draws.last_node)
        numbers = self.heads.ask(hidden, draws.sampler, draws.draft_context, self._policy.levels)
        self._drafting += time.perf_counter() - start
        return DeferredRead(numbers, self._receive)

    def _receive(self, numbers: list[float]) -> None:
        self._ahead = self.heads.read(numbers)

    def commit(self, cache: FullCache, verification: Verification, path: list[int], tokens: list[int]) -> None:
        if self._candidates is None:
            return
        for node, token in zip(path, tokens, strict=True):
            self._candidates.observe(self._chosen[node], token)
        self.index.extend(tokens)
        # The next verification may write over its own.
        self._hidden = verification.hidden[path[-1] : path[-1] + 1].clone()
        # A level is credited for what heads alone had drafted.
        gained = [self._tree.sources[node] == {"heads"} for node in path[1:]][: self._levels]
        gained += [False] * (self._levels - len(gained))
        nodes, overhead = len(self._tree), self._drafting
        if self.context.running() == 1:  # else the rest of the step is other texts', too
            overhead = time.perf_counter() - self._start - self._costs[nodes]
        self._policy.observe(self._levels, gained, len(tokens) - sum(gained), nodes, overhead, self._costs)

    def finish(self, statistics: Statistics) -> None:
        pass
