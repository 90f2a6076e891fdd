"""Trees that earn their cost: from what sources offer, the nodes that raise the tokens per second."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, Protocol

import torch

from decoder.cache.full import FullCache
from decoder.drafters.base import DeferredRead, DrafterContext
from decoder.drafters.tuning.odds import Calibration, Odds
from decoder.drafters.tuning.running_costs import RunningCosts
from decoder.drafters.tuning.verify_costs import WIDEST
from decoder.drafters.tuning.ways import Ways
from decoder.model.target import Verification
from decoder.sampling.sampler import Sampler, TreeDraws
from decoder.sampling.token_tree import TokenTree
from decoder.stats import Statistics

_WORTH = 16  # new tokens from which on it pays to measure costs
_USUAL = 8  # nodes of a usual tree
_LEVELS = (1, 8, 0)  # most levels of costly sources: the ways that are tried, the preferred one first
_LATELY = 8  # steps for which the costs are taken as they were known before
_REPEATED = 1.0  # drafted tokens to be accepted that cost nothing: from there on the text repeats itself
_SECONDED, _ALONE = "seconded", "alone"  # kinds of offers where two sources offered, of both or of the first only
_LESS = 0.3  # how much less likely the latter are, at first
_EXPLORE = 48  # steps between two that are held small
_SMALL = (1, 4, 1, 2)  # nodes they are held at in turn


class Offer(NamedTuple):
    """A candidate for the token behind some node.

    Attributes:
        token: its id.
        kind: what its chance is learnt by.
        guess: its chance before anything was learnt.
        place: where its source goes on from it.
    """

    token: int
    kind: Hashable
    guess: float
    place: object


class Source(Protocol):
    """Offers candidates node by node, so that it works only where it pays."""

    name: str

    def root(self, sampler: Sampler, rate: Callable[[], float], node_seconds: float, levels: int) -> object | None:
        """Where it begins in this step; None when it has nothing to offer.

        ``levels`` is how deep offers that take time may go. ``rate`` gives the tokens per second of the step as it is
        by then: work whose expected gain is below that times its cost, with ``node_seconds`` for each node that it adds
        to the verification, is not done.
        """

    def offers(self, place: object) -> list[Offer]:
        """Candidates behind a node at ``place``."""

    def commit(self, verification: Verification, path: list[int], tokens: list[int]) -> None:
        """As in `Drafter.commit`."""


class CostlySource(Source, Protocol):
    """A source whose offers take time of their own, and may be asked for before it is known how a step ended."""

    looking_seconds: float
    """What it asked the device for when it last looked ahead takes about so long."""

    def draft_ahead(self, verification: Verification, draws: TreeDraws, levels: int) -> DeferredRead | None:
        """As in `DraftsAhead.draft_ahead`, ``levels`` as in `root`."""


class _Candidates:
    """Nodes that a step may verify, and the chance that the text goes through each.

    Args:
        root: the newest token of the text.
        depth: how deep they may go.
        odds: what chances are learnt in.

    Attributes:
        offered: by node, the kinds and tokens of what its sources offered behind it.
    """

    def __init__(self, root: int, depth: int, odds: Odds):
        self.tree, self.chances = TokenTree(root), [1.0]
        self.offered: dict[int, list[tuple[Hashable, int]]] = {}
        self._depth, self._odds = depth, odds

    def grow(self, source: Source, place: object, floor: float) -> None:
        """Add what ``source`` offers from its ``place`` at the root on, best first and down to the chance ``floor``."""
        tree, heap, order = self.tree, [], count()  # the order breaks ties, so that offers are never compared
        most = len(tree) + WIDEST

        def ask(place: object, node: int) -> None:
            offers = source.offers(place)
            if offers:
                seconded = self._second(node, offers)
                for offer in offers:
                    chance = self._odds.chance(offer.kind, offer.guess)
                    if offer.token in seconded:
                        chance = self._odds.chance((offer.kind, _SECONDED), chance)
                    heappush(heap, (-self.chances[node] * chance, next(order), node, offer))

        ask(place, 0)
        while heap and len(tree) < most:
            negative, _, parent, offer = heappop(heap)
            if -negative < floor:
                break
            node = tree.add(parent, offer.token, source.name)
            if node == len(self.chances):
                self.chances.append(0.0)
            self._revise(node, -negative)
            if tree.depths[node] < self._depth:
                ask(offer.place, node)

    def _second(self, node: int, offers: list[Offer]) -> set[int]:
        """Note what is offered behind ``node``, and which of the tokens another source has offered there before.

        Those that it alone has offered are less likely now.
        """
        before, tokens = self.offered.setdefault(node, []), {offer.token for offer in offers}
        seconded = tokens.intersection(token for _, token in before)
        alone = [((kind, _ALONE), token) for kind, token in before if token not in seconded]
        for kind, token in alone:
            child = self.tree.child(node, token)
            if child is not None:
                usual = self.chances[child] / self.chances[node]
                self._revise(child, self.chances[node] * self._odds.chance(kind, _LESS * usual))
        before += [(offer.kind, offer.token) for offer in offers]
        before += [((offer.kind, _SECONDED), offer.token) for offer in offers if offer.token in seconded]
        before += alone
        return seconded

    def _revise(self, node: int, chance: float) -> None:
        """More is known of ``node``, and what lies behind it is as much likelier or less likely."""
        before, behind = self.chances[node], {node}
        self.chances[node] = chance
        for later in range(node + 1, len(self.chances)):
            if self.tree.parents[later] in behind:
                # Rounded so, nothing gets likelier than what it stands behind.
                self.chances[later] = self.chances[later] / before * chance
                behind.add(later)

    def likeliest(self) -> list[int]:
        """All nodes, the likeliest first, each behind its parent."""
        return sorted(range(len(self.chances)), key=self.chances.__getitem__, reverse=True)


class Tuned:
    """Grows the tree that gives most tokens per second in its step.

    The tokens of the text are given, so what counts is how long each place of it takes: a token that is hard to draft
    is worth a step of plain decoding, however fast other parts of the text go by. So nodes, and levels of heads, are
    weighed against what the step gives without them, and not against the tokens per second of late.

    Sources are asked best first: the candidate with the highest chance that the text goes through it is next, and what
    may follow it is offered then. Of all candidates the step verifies as many as make its tokens per second highest;
    with none it is plain decoding. Chances come from how often candidates of the same kind were right, in this text and
    in those before it with the same sampling.

    Args:
        sources: those whose offers take no time to speak of.
        odds: what chances are learnt in.
        costly: one more, whose offers do; how deep they go is then tried out (`Ways`).
    """

    max_nodes = WIDEST
    observed_queries = 0

    def __init__(
        self, context: DrafterContext, sources: Sequence[Source], odds: Odds, costly: CostlySource | None = None
    ):
        if context.options.verification != "exact":
            raise ValueError(
                "cost-tuned trees (methods auto and suffix) follow the clock, and so would the text of "
                f"{context.options.verification} verification: take another method, or exact verification"
            )
        self.costs = context.costs
        self.wanted = context.max_new_tokens
        self.odds = odds
        self.sources = sources if costly is None else [*sources, costly]
        self._costly = costly
        self._offered: dict[int, list[tuple[Hashable, int]]] = {}  # by node of the candidates
        self._kept: list[int] = []  # the candidates that are the tree
        ways = 1 if costly is None else len(_LEVELS)
        self._ways: Ways = context.tuning_state.setdefault(("ways", ways), Ways(ways))
        self._accepting: Calibration = context.tuning_state.setdefault("accepting", Calibration())
        self._seconds: list[float] = []  # of verifying n nodes, as it was known lately
        self._hoped = 0.0  # drafted tokens to be accepted in this step
        self._telling = True  # the step shows how good the way is
        self._way = self._ways.now  # of this step
        self._began = self._drafting = self._looking = 0.0
        self._steps = 0
        self._costs: RunningCosts | None = None

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> None:
        if self.wanted >= _WORTH:
            self.costs.at(cache)
            self._ways.begin()

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        if self.wanted < _WORTH:
            return TokenTree(sampler.context[-1])
        if self._steps % _LATELY == 0:
            self._costs = self.costs.at(cache)
            self._seconds = self._costs.seconds(self.max_nodes)
        self._began, self._telling, self._way = time.perf_counter(), True, self._ways.now
        costs = self._seconds
        self._steps += 1
        # No tree or a small one now and then: else their cost would not be known.
        most = self.max_nodes if self._steps % _EXPLORE else _SMALL[self._steps // _EXPLORE % len(_SMALL)]
        candidates = _Candidates(sampler.context[-1], depth, self.odds)
        if most > 1 and depth:
            node_seconds = (costs[_USUAL] - costs[2]) / (_USUAL - 2)

            def rate() -> float:
                return self._best(candidates)[1]

            # What costs nothing first: it tells how fast the step is without what does.
            for source in self.sources:
                if source is self._costly:
                    # Where the text repeats itself any way is fast, and the luck of meeting such places is no merit.
                    self._telling = sum(candidates.chances[1:]) < _REPEATED
                place = source.root(sampler, rate, node_seconds, _LEVELS[self._way])
                if place is not None:
                    # A node far below the cost of one more is hardly ever worth its own.
                    candidates.grow(source, place, 0.5 * rate() * node_seconds)
        self._offered = candidates.offered
        self._kept = candidates.likeliest()[: min(most, self._best(candidates)[0])]
        self._hoped = sum(candidates.chances[node] for node in self._kept[1:])
        candidates.tree.select(self._kept)
        self._drafting, self._looking = time.perf_counter() - self._began, 0.0
        return candidates.tree

    def _best(self, candidates: _Candidates) -> tuple[int, float]:
        """How many of them to verify, and the tokens per second that this step then gives."""
        spent = time.perf_counter() - self._began + self._looking
        costs = self._seconds
        best, size, hoped = 1 / (costs[1] + spent), 1, 0.0
        for nodes, node in enumerate(candidates.likeliest()[1 : self.max_nodes], start=2):
            hoped += candidates.chances[node]
            rate = (1 + self._accepting.corrected(hoped)) / (costs[nodes] + spent)
            if rate > best:
                best, size = rate, nodes
        return size, best

    def draft_ahead(self, verification: Verification, draws: TreeDraws) -> DeferredRead | None:
        if self._costs is None or self._costly is None:
            return None
        question = self._costly.draft_ahead(verification, draws, _LEVELS[self._ways.now])
        self._looking = self._costly.looking_seconds
        return question

    def commit(self, cache: FullCache, verification: Verification, path: list[int], tokens: list[int]) -> None:
        if self._costs is None:
            return
        for node, token in zip(path, tokens, strict=True):
            for kind, offered in self._offered.get(self._kept[node], ()):
                self.odds.observe(kind, offered == token)
        for source in self.sources:
            source.commit(verification, path, tokens)
        if self._hoped:
            self._accepting.observe(self._hoped, len(path) - 1)
        seconds = time.perf_counter() - self._began
        if self._telling:
            self._ways.observe(self._way, len(tokens), seconds)
        seconds -= self._drafting
        # What looking ahead took is an estimate, and some of it may have been hidden behind the verification.
        self._costs.observe(len(verification.hidden), seconds - min(self._looking, 0.5 * seconds))

    def finish(self, statistics: Statistics) -> None:
        pass
