"""Trees that earn their cost: of all that a method's sources offer, the nodes that raise tokens per second."""

import time
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from decoder.backends.base import PassOutput
from decoder.cache.full import FullCache
from decoder.drafters.base import DeferredRead, Drafter, DrafterContext
from decoder.drafters.block_levels import make_levels
from decoder.drafters.layer_levels import LayerLevels
from decoder.drafters.levels import HeadLevels, Level, Levels, LevelsWanted, State
from decoder.drafters.model_levels import DraftModelLevels
from decoder.drafters.tuning.candidate_tree import AcceptanceEstimate, CandidateTree, Kind
from decoder.drafters.tuning.cost_slope import CostSlope
from decoder.drafters.tuning.level_policy import Average, Expected, LevelPolicy
from decoder.drafters.tuning.verify_costs import WIDEST
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree
from decoder.sampling.tree_draws import TreeDraws
from decoder.work import Work

_DEEPEST = 8  # levels of conditioned heads at most
_FIRST_OF_MODEL = 4  # levels of a draft model that are asked for at first
_WIDTH = 6  # candidates per branch of a level of heads
_BEAM = 4  # branches of a level that the next one goes on from
_TURN, _TURNS = 32, 32  # steps of a turn, and turns of which each source of levels gets one to be tried
_FAR = 4.0  # in score: what trails the best candidate by more is hardly ever right


class CostTuned(Drafter):
    """Verifies, of all candidates of a step, as many of the likeliest as make its tokens per second highest.

    The text does not depend on the drafts, so what counts is how long each part of it takes: a token that is hard to
    draft is worth a step of plain decoding, however fast other parts go by. Candidates come from draft heads or a draft
    model, of which a `LevelPolicy` says how many levels to run, none included; a method may add what it finds without
    them (`_offer_before_levels`) or behind them (`_offer_level`). The acceptance rates and costs seen in one sequence
    serve the next.

    Where there are both, one of them drafts in a step. Each has a turn to be tried now and then; between these it is
    the one that gave more tokens per second. Behind each pass of a draft model it is asked whether another one pays.
    """

    takes_draft_model: ClassVar[bool] = False
    """Whether it drafts with a draft model where there is one."""
    max_nodes = WIDEST
    keeps_within: ClassVar[bool] = True
    """Its trees keep within the sequence's constraint, and have the tokens that it forces where these pay."""

    def __init__(self, context: DrafterContext) -> None:
        self.context = context
        self._sources: list[Levels] = [] if context.heads is None else [make_levels(context, _WIDTH, _BEAM)]
        self._draft_model: DraftModelLevels | None = None
        if self.takes_draft_model and context.draft_model is not None:
            self._draft_model = DraftModelLevels(context, _WIDTH)
            self._draft_model.goes_on = self._goes_on
            self._sources.append(self._draft_model)
        self._source = self._sources[0] if self._sources else None  # of this step's levels
        self._pass_seconds: Average = context.tuning_state.setdefault("draft model's pass", Average())
        self._own_level = False  # whether the first level is what the state itself predicts, as for `HeadLevels.ask`
        self._estimate: AcceptanceEstimate = context.tuning_state.setdefault("acceptance", AcceptanceEstimate())
        self._slope: CostSlope = context.tuning_state.setdefault("slope", CostSlope())
        self._before: tuple[float, float] | None = None  # measured cost and seconds of the step before
        self._ahead: list[Level] | None = None  # of the next step, as soon as they are drafted
        self._asked = 0  # levels, of which fewer may have come
        self._chain = 1.0  # how likely the chain that a draft model has drafted is right so far
        # Of this step:
        self._chosen: list[int] = []  # the candidates that are nodes of the tree
        self._expected: list[Expected] = []  # what it would be without levels, with one, and so on
        self._typical = True  # whether it could run levels, and they pay in it if they pay at all
        self._start = self._drafting = 0.0  # when it began, and seconds spent on drafts

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> Work[None] | None:
        return self.context.costs.begin(cache)

    def long_work(self, cache: FullCache) -> Work[None] | None:
        return self.context.costs.missing(cache)

    @property
    def feature_reader(self) -> LayerLevels | None:
        return next((source for source in self._sources if isinstance(source, LayerLevels)), None)

    def prompt_reader(self) -> Callable[[int], None] | None:
        model = self._draft_model
        return model.read_prompt if model is not None and model.reads_prompt else None

    def wants_levels(self, cache: FullCache, sampler: Sampler, depth: int) -> LevelsWanted | None:
        """Begin a step; the policy's levels, where they pay in it and were not drafted ahead."""
        sequences = self.context.running()
        self._measured = self.context.costs.at(cache, sequences)
        self._costs = costs = self._slope.applied(self._measured) if sequences == 1 else self._measured
        self._start = time.perf_counter()  # what measuring costs takes is no part of a step
        if self._ahead is None:
            self._choose_source(sequences)
        self._policy = self._level_policy(sequences, self._own_level)
        # Half as likely as pays for a node at the rate of plain decoding.
        floor = 0.5 * (costs[WIDEST] - costs[1]) / (WIDEST - 1) / costs[1]
        self._tree = TokenTree(sampler.context[-1])
        self._candidates = CandidateTree(self._tree, depth, floor, self._estimate, sampler.constraint)
        self._offer_before_levels()
        wanted, self._asked = None, 0
        # What is drafted ahead is there in any case.
        self._typical = depth > 0 and (self.context.target.draws_whole_trees or self._levels_pay())
        if self._typical and self._ahead is None and self._policy.levels:
            if (state := self._state(cache, sampler)) is None:
                self._typical = False
            else:
                self._asked, self._chain = self._policy.levels, 1.0
                wanted = LevelsWanted(self._source, state, sampler, self._asked, self._own_level, self._take_levels)
        self._drafting = time.perf_counter() - self._start
        return wanted

    def _level_policy(self, sequences: int, own_level: bool) -> LevelPolicy:
        """How many levels a step runs in which so many sequences are decoded, with or without such a first level."""
        return self._policy_of(self._source, sequences, own_level)

    def _policy_of(self, source: Levels | None, sequences: int, own_level: bool = False) -> LevelPolicy:
        most = 0 if source is None else _or_deepest(source.most(own_level))
        # Heads that pay for one sequence may not pay for many, whose verification is one pass. A level of the model's
        # own takes a pass, whether heads go on from it or not: it is tried together with a head.
        key = "levels", source and source.source, most, own_level, sequences.bit_length()
        known = self.context.tuning_state
        if key not in known:
            at_once = source is not None and source.at_once
            # A draft model stops by itself where more do not pay; where all come at once, fewer hardly cost less.
            first = _FIRST_OF_MODEL if source is not None and source.stops_early else most if at_once else 1 + own_level
            known[key] = LevelPolicy(most, first, sequences, at_once)
        return known[key]

    def _choose_source(self, sequences: int) -> None:
        """Whose levels to draft in this step: those that pay more, unless the others have their turn to be tried."""
        if len(self._sources) < 2:
            return
        policies = [self._policy_of(source, sequences) for source in self._sources]
        turn = sum(policy.steps for policy in policies) // _TURN % _TURNS
        rates = [policy.rate(policy.best) for policy in policies]
        self._source = self._sources[turn if turn < len(policies) else rates.index(max(rates))]

    def _goes_on(self, level: int, row: list[tuple[int, float]]) -> bool:
        """Whether one more level of the draft model pays behind this one, as far as the chain is likely to be right.

        That is the case where the tokens that it can bring are more than steps bring in the time that it takes.
        """
        kind, prior = self._kind(level, 0, row)
        rate = self._estimate.rate(kind, prior) if kind else 0.0
        self._chain *= rate
        plain, policy = self._costs[1], self._policy
        node = self._costs[level + 3] - self._costs[level + 2]
        return self._chain * rate >= max(policy.rate(policy.best), 1 / plain) * (self._pass_seconds.value + node)

    def _levels_pay(self) -> bool:
        """Whether the policy's levels, one at least, are worth their time beside the candidates that are there already.

        They are where there are none: the policy has decided for steps like that.
        """
        tree, chances, policy = self._tree, self._candidates.chances, self._policy
        begin = self._candidates.end(0)
        if begin is None or (self._source is not self._draft_model and tree.depths[begin] >= policy.levels > 0):
            return False  # the constraint forces more tokens than they would draft
        covered = sum(chances[node] for node in range(1, len(tree)) if tree.parents[node] == begin)
        if not covered or self._source is None:
            return True
        levels = max(1, policy.best)  # and not one that is on trial
        tokens, cost = self._best(0)[1]
        seconds = policy.seconds(levels) - policy.seconds(0)
        return (1 - covered) * policy.tokens(1, levels) >= seconds * tokens / policy.whole(cost, 0)

    def _take_levels(self, levels: list[Level], seconds: float) -> None:
        if self._draft_model is not None and self._source is self._draft_model:
            # Catching up is what a step takes that tries drafts where steps do without, and no part of drafting.
            behind, self._draft_model.behind_seconds = self._draft_model.behind_seconds, 0.0
            seconds, self._start = max(0.0, seconds - behind), self._start + behind
            if levels:
                self._pass_seconds.observe(seconds / len(levels))
        self._ahead = levels
        self._drafting += seconds

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        start = time.perf_counter()
        levels, self._ahead = self._ahead or [], None
        size, expected = self._best(0)
        self._expected = [expected]
        nodes: list[int | None] = [0]
        for number, level in enumerate(levels):
            nodes = self._offer_level(number, level, nodes)
            size, expected = self._best(number + 1)
            self._expected.append(expected)
        # The number of levels that was asked for has brought this: it is compared with others by all of its steps.
        self._expected += [expected] * (self._asked - len(levels))
        self._chosen = self._candidates.likeliest()[:size]
        if len(self._tree) > 1:
            self._tree.select(self._chosen)
        self._drafting += time.perf_counter() - start
        return self._tree

    def _best(self, levels: int) -> tuple[int, Expected]:
        """How many of the candidates to verify behind so many levels, and what this brings and costs."""
        widest = self.context.target.most_nodes or WIDEST
        tokens, rate, best = 0.0, 0.0, (1, Expected(1.0, self._costs[1]))
        for nodes, node in enumerate(self._candidates.likeliest()[:widest], start=1):
            tokens += self._candidates.chances[node]
            if (found := tokens / self._policy.whole(self._costs[nodes], levels)) > rate:
                rate, best = found, (nodes, Expected(tokens, self._costs[nodes]))
        return best

    def _offer_before_levels(self) -> None:
        """Offer candidates that cost no pass over any weights."""

    def _state(self, cache: FullCache, sampler: Sampler) -> State | None:
        """What levels are drafted from: what the verification has computed; None where nothing is known yet."""
        return self._source.state_behind(cache, sampler)

    def _offer_level(self, depth: int, level: Level, before: list[int | None]) -> list[int | None]:
        """Offer the candidates of a level behind those of the level ``before``; returns their nodes."""
        if self._source is self._draft_model:
            before = [self._candidates.end(node) for node in before]  # it reads forced tokens and drafts behind them
        if level.parents is None:
            known = [node for node in before if node is not None]
            parents = [sorted(known, key=self._candidates.chances.__getitem__, reverse=True)[:_BEAM]]
        else:
            parents = [[before[index]] for index in level.parents]
        rows = zip(level.rows, parents, strict=True)
        return [node for row, behind in rows for parent in behind for node in self._offer_row(parent, depth, row)]

    def _offer_row(self, parent: int | None, depth: int, row: list[tuple[int, float]]) -> list[int | None]:
        """The tokens of one row, told apart by rank and by the margin to the best of the others; their nodes."""
        nodes: list[int | None] = []
        for rank, (token, _) in enumerate(row if parent is not None else ()):
            kind, prior = self._kind(depth, rank, row)
            if kind is None:
                break
            nodes.append(self._candidates.offer(parent, token, kind, prior))
        return nodes + [None] * (len(row) - len(nodes))

    def _kind(self, depth: int, rank: int, row: list[tuple[int, float]]) -> tuple[Kind | None, float]:
        """The kind of a candidate of a level, and how likely it is right before any was seen; None where it is not."""
        score = row[rank][1]
        # Behind a filter that leaves one token there is no rival.
        margin = min(_FAR, score - row[rank == 0][1]) if len(row) > 1 else _FAR
        if not (score > -torch.inf and margin >= -_FAR):
            return None, 0.0
        # As SmolLM2's heads and those of the reference model, which are better, are right on average.
        shape, prior = (rank, int(2 * margin)), 0.22 / rank * 2**margin if rank else 0.3 + 0.13 * margin
        name, head = self._source.source, depth - self._own_level
        if self._source is self._draft_model:
            head = 0  # it reads the drafts before, and is as good behind many of them
        return (name, head, *shape), prior

    def draft_ahead(self, verification: PassOutput, draws: TreeDraws) -> DeferredRead | None:
        self._choose_source(self.context.running())
        heads = self._source
        if not isinstance(heads, HeadLevels) or not heads.drafts_ahead:
            return None
        # Behind a step without levels it is asked when the next one begins, if they pay in it.
        if not self._policy.levels or not (heads.state is None or len(self._expected) > 1):
            return None
        start = time.perf_counter()
        hidden = verification.hidden.index_select(0, draws.last_node)
        numbers = heads.ask(hidden, draws.sampler, draws.draft_context, self._policy.levels)
        self._drafting += time.perf_counter() - start
        return DeferredRead(numbers, lambda read: self._take_levels(heads.read(read), 0.0))

    def commit(self, cache: FullCache, verification: PassOutput, path: list[int], tokens: list[int]) -> None:
        for source in self._sources:
            source.follow(verification, path, tokens)
        self._take_in(cache, verification, path, tokens)
        for node, token in zip(path, tokens, strict=True):
            self._candidates.observe(self._chosen[node], token)
        cost, rest = self._costs[len(self._tree)], 0.0
        if self.context.running() == 1:  # else the rest of the step is other sequences', too
            rest = time.perf_counter() - self._start - cost - self._drafting
        drafting, rest = self.context.target.ranks.agree((self._drafting, rest))
        if self.context.target.draws_whole_trees:
            # Drafts are launched there and not waited for, so their time is a part of the rest.
            drafting, rest = drafting + rest, 0.0
        if self._typical:  # numbers of levels are compared on steps that would have run them
            # Costs that were measured in a slow moment are too high; a step takes more than nothing all the same.
            least = -0.9 * self._costs[1]
            self._policy.observe(self._expected, cost, max(least, drafting), max(least, rest))
        self._learn_slope(cost + rest)

    def _learn_slope(self, seconds: float) -> None:
        """Compare this step, which took so many seconds beside its drafts, with the one before."""
        if self.context.running() > 1 or self.context.target.draws_whole_trees:
            self._before = None  # the time of other sequences, or of a device, tells nothing of this one's
            return
        cost = self._measured[len(self._tree)]
        if self._before is not None:
            self._slope.observe(cost - self._before[0], seconds - self._before[1], self._measured[1])
        self._before = cost, seconds

    def _take_in(self, cache: FullCache, verification: PassOutput, path: list[int], tokens: list[int]) -> None:
        """Take in the sequence's newest ``tokens``."""


def _or_deepest(levels: int | None) -> int:
    return _DEEPEST if levels is None else levels
