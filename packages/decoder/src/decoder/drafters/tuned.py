"""Trees that earn their cost: from what sources offer, the nodes that raise the tokens per second."""

import time
from collections.abc import Hashable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

import torch

from decoder.acceptance import Ending, Question
from decoder.drafters.base import Resources
from decoder.full_cache import FullCache
from decoder.odds import Calibration, Odds
from decoder.running_costs import RunningCosts
from decoder.sampler import Sampler
from decoder.stats import Statistics
from decoder.target import Verification
from decoder.token_tree import TokenTree
from decoder.verify_costs import WIDEST
from decoder.ways import Ways

_WORTH = 16  # new tokens from which on it pays to measure costs
_USUAL = 8  # nodes of a usual tree
_LEVELS = (2, 8, 0)  # most levels of costly sources: the ways that are tried, the preferred one first
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

    def root(self, sampler: Sampler, rate: float, node_seconds: float, levels: int) -> object | None:
        """Where it begins in this step; None when it has nothing to offer.

        ``levels`` is how deep offers that take time may go. ``rate`` is the tokens per second to beat: work whose
        expected gain is below ``rate`` times its cost, with ``node_seconds`` for each node that it adds to the
        verification, is not done.
        """

    def offers(self, place: object) -> list[Offer]:
        """Candidates behind a node at ``place``."""

    def commit(self, verification: Verification, path: list[int], tokens: list[int]) -> None:
        """As in `Drafter.commit`."""


class CostlySource(Source, Protocol):
    """A source whose offers take time of their own, and may be asked for before it is known how a step ended."""

    looking_seconds: float
    """What it asked the device for when it last looked ahead takes about so long."""

    def look_ahead(self, verification: Verification, sampler: Sampler, ending: Ending, levels: int) -> Question | None:
        """As in `LooksAhead.look_ahead`, ``levels`` as in `root`."""


class Tuned:
    """Grows the tree that maximises tokens - rate x seconds, with rate the tokens per second of late.

    A policy that maximises this difference with its own rate maximises the rate itself (renewal-reward theorem). The
    tree grows best first: the candidate with the highest chance that the text goes through it is next, and sources
    offer what may follow it. The grown tree is then cut at the number of nodes with the best difference; with none
    left the step is plain decoding. Chances come from how often candidates of the same kind were right.

    Args:
        sources: those whose offers take no time to speak of.
        odds: what chances are learnt in.
        costly: one more, whose offers do; how deep they go is then tried out (`Ways`).
    """

    max_nodes = WIDEST

    def __init__(self, resources: Resources, sources: Sequence[Source], odds: Odds, costly: CostlySource | None = None):
        if resources.options.verification != "exact":
            raise ValueError(
                "cost-tuned trees (methods auto and suffix) follow the clock, and so would the text of "
                f"{resources.options.verification} verification: take another method, or exact verification"
            )
        self.costs = resources.costs
        self.wanted = resources.max_new_tokens
        self.odds = odds
        self.sources = sources if costly is None else [*sources, costly]
        self._costly = costly
        self._offered: dict[int, list[tuple[Hashable, int]]] = {}
        self._ways = Ways(1 if costly is None else len(_LEVELS))
        self._accepting = Calibration()
        self._hoped = 0.0  # drafted tokens to be accepted in this step
        self._began = self._drafting = self._looking = 0.0
        self._steps = 0
        self._costs: RunningCosts | None = None

    def start(self, cache: FullCache, queries: Mapping[int, torch.Tensor]) -> None:
        if self.wanted >= _WORTH:
            self.costs.at(cache)

    def propose(self, cache: FullCache, sampler: Sampler, depth: int) -> TokenTree:
        if self.wanted < _WORTH:
            return TokenTree(sampler.context[-1])
        self._costs = self.costs.at(cache)
        self._began = time.perf_counter()
        costs = self._costs.seconds(_USUAL)
        rate = max(self._ways.rate, 1 / costs[1])
        self._steps += 1
        # No tree or a small one now and then: else their cost would not be known.
        most = self.max_nodes if self._steps % _EXPLORE else _SMALL[self._steps // _EXPLORE % len(_SMALL)]
        node_seconds = (costs[_USUAL] - costs[2]) / (_USUAL - 2)
        tree, chances = self._grow(node_seconds, rate, sampler, depth if most > 1 else 0)
        tree.cut(self._best_size(rate, chances[:most]))
        self._drafting, self._looking = time.perf_counter() - self._began, 0.0
        return tree

    def look_ahead(self, verification: Verification, sampler: Sampler, ending: Ending) -> Question | None:
        if self._costs is None or self._costly is None:
            return None
        question = self._costly.look_ahead(verification, sampler, ending, _LEVELS[self._ways.now])
        self._looking = self._costly.looking_seconds
        return question

    def _grow(self, node_seconds: float, rate: float, sampler: Sampler, depth: int) -> tuple[TokenTree, list[float]]:
        """The tree best first, and the chance of each of its nodes, in falling order."""
        tree, chances = TokenTree(sampler.context[-1]), [1.0]
        self._offered = {}
        heap: list[tuple] = []
        order = 0  # breaks ties, so that offers are never compared

        def ask(source: Source, place: object, node: int, joint: float) -> None:
            nonlocal order
            for offer in source.offers(place):
                chance = joint * self.odds.chance(offer.kind, offer.guess)
                self._offered.setdefault(node, []).append((offer.kind, offer.token))
                order += 1
                heappush(heap, (-chance, order, node, offer.token, offer.place, source))

        for source in self.sources if depth else ():
            place = source.root(sampler, rate, node_seconds, _LEVELS[self._ways.now])
            if place is not None:
                ask(source, place, 0, 1.0)
        # A node far below the cost of one more is hardly ever worth its own.
        floor = 0.5 * rate * node_seconds
        while heap:
            negative, _, parent, token, place, source = heappop(heap)
            if -negative < floor:
                break
            node = tree.child(parent, token)
            if node is None:
                if len(tree) == self.max_nodes:
                    break
                chances.append(-negative)
            node = tree.add(parent, token, source.name)
            if tree.depths[node] < depth:
                ask(source, place, node, chances[node])
        return tree, chances

    def _best_size(self, rate: float, chances: list[float]) -> int:
        if len(chances) == 1:
            self._hoped = 0.0
            return 1
        costs = self._costs.seconds(len(chances))
        best, size, hoped = float("-inf"), 1, 0.0
        for nodes, chance in enumerate(chances, start=1):
            hoped += chance if nodes > 1 else 0.0
            gain = self._accepting.corrected(hoped) - rate * costs[nodes]
            if gain > best:
                best, size = gain, nodes
        self._hoped = sum(chances[1:size])
        return size

    def commit(self, cache: FullCache, verification: Verification, path: list[int], tokens: list[int]) -> None:
        if self._costs is None:
            return
        for node, token in zip(path, tokens, strict=True):
            for kind, offered in self._offered.get(node, ()):
                self.odds.observe(kind, offered == token)
        for source in self.sources:
            source.commit(verification, path, tokens)
        if self._hoped:
            self._accepting.observe(self._hoped, len(path) - 1)
        seconds = time.perf_counter() - self._began
        self._ways.observe(len(tokens), seconds)
        seconds -= self._drafting
        # What looking ahead took is an estimate, and some of it may have been hidden behind the verification.
        self._costs.observe(len(verification.hidden), seconds - min(self._looking, 0.5 * seconds))

    def finish(self, statistics: Statistics) -> None:
        pass
