"""The step that reads as the pipeline, for all texts that are being decoded."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from decoder.drafters.base import DeferredRead, DraftsAhead, WantsLevels
from decoder.drafters.levels import fill_together
from decoder.kernels.bitwise_attention import DEPTH
from decoder.kernels.transfers import download
from decoder.model.target import Target
from decoder.model.verification import Verification
from decoder.sampling.acceptance import Walk, walk
from decoder.sampling.sampler import TreeDraws
from decoder.sampling.token_tree import TokenTree
from decoder.sequence import Sequence

Fits = Callable[[list[Sequence], Sequence], bool]
"""Whether a sequence may join those that are running."""


class Engine:
    """Decodes sequences together: a finished one leaves, a waiting one joins.

    Accepted exactly, a text depends on target and sampler alone: neither on its drafter nor on who runs beside it.

    Args:
        target: the model.
        fits: whether a sequence may join those running now; one that runs alone is never asked for. None lets all join.

    Attributes:
        running: the sequences that steps decode.
        waiting: those that have not begun.
    """

    def __init__(self, target: Target, fits: Fits | None = None):
        self.target, self.fits = target, fits
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()

    def add(self, sequence: Sequence) -> None:
        """Let a sequence join as soon as there is room for it."""
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Forget a sequence, running or waiting; the others go on."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    @torch.inference_mode()
    def step(self) -> list[tuple[Sequence, list[int]]]:
        """Draft, verify, accept, commit: the next one or more tokens of every running sequence.

        Sequences that are done have left, and those that found room have joined and begun. One whose own hook, drafter
        or logits fail leaves with its `Sequence.error`, and the others go on.

        Returns:
            Each sequence that ran with its new tokens, the finished ones included.
        """
        self._admit()
        stepped = list(self.running)
        tokens = self.decode([sequence for sequence in stepped if not sequence.done])
        self.running = [sequence for sequence in self.running if not sequence.done]
        return [(sequence, tokens.get(sequence, [])) for sequence in stepped]

    def _admit(self) -> None:
        while self.waiting:
            if self.running and self.fits is not None and not self.fits(self.running, self.waiting[0]):
                return
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            if not sequence.done:
                with _failure_of(sequence):
                    self._prefill(sequence)

    def _prefill(self, sequence: Sequence) -> None:
        """Commit the prompt but its last token."""
        start = time.perf_counter()
        if self.running == [sequence]:
            self.target.refresh_weights()
        drafter = sequence.drafter
        with self.target.patched():
            prompt = sequence.sampler.context[:-1]
            queries = self.target.prefill(prompt, sequence.cache, drafter.observed_queries)
            drafter.start(sequence.cache, queries)
        self.target.wait()
        sequence.statistics.prefill_seconds = time.perf_counter() - start

    def decode(self, sequences: list[Sequence]) -> dict[Sequence, list[int]]:
        """The part of a step that is timed: the new tokens of sequences that have begun.

        Apart from `step`, so that a profiler can wrap what is repeated without the prefill of those that join.
        """
        start = time.perf_counter()
        with self.target.patched():
            trees = self._propose(sequences)
            if not trees:
                return {}
            observe = any(sequence.drafter.observed_queries for sequence in trees)
            caches = [sequence.cache for sequence in trees]
            verifications = self.target.forward(list(trees.values()), caches, observe)
            steps = list(zip(trees, trees.values(), verifications, strict=True))
            walks = self._launch(steps)
        tokens = {}
        for sequence, tree, verification in steps:
            with _failure_of(sequence):
                tokens[sequence] = self._accept(sequence, tree, verification, walks[sequence])
        # The tokens have come from the device, so no more waiting is needed to know the time.
        seconds = time.perf_counter() - start
        for sequence in tokens:
            sequence.statistics.decode_seconds += seconds
            sequence.statistics.shared_seconds += seconds / len(tokens)
        return tokens

    def _propose(self, sequences: list[Sequence]) -> dict[Sequence, TokenTree]:
        # One more token than is accepted comes anyway, and no position beyond the last one may be looked at.
        depths = {sequence: min(sequence.remaining - 1, DEPTH) for sequence in sequences}
        if len(sequences) > 1:
            self._fill_levels(depths)
        trees = {}
        for sequence, depth in depths.items():
            if sequence.error is None:
                with _failure_of(sequence):
                    tree = sequence.drafter.propose(sequence.cache, sequence.sampler, depth)
                    tree.prune(depth, self.target.most_nodes)
                    trees[sequence] = tree
        return trees

    def _fill_levels(self, depths: dict[Sequence, int]) -> None:
        """Run the draft heads of all sequences as one, before these propose."""
        wanted = []
        for sequence, depth in depths.items():
            if isinstance(sequence.drafter, WantsLevels):
                with _failure_of(sequence):
                    wanted.append(sequence.drafter.wants_levels(sequence.cache, sequence.sampler, depth))
        if any(wanted):
            fill_together([one for one in wanted if one is not None])

    def _launch(self, steps: list[tuple[Sequence, TokenTree, Verification]]) -> dict[Sequence, Walk]:
        """The walk of each sequence along what the target chose.

        Where whole trees are drawn on the device, all of it and what drafters need next is asked for before the host
        waits, once, for all of it.
        """
        walks: dict[Sequence, Walk] = {}
        reads: list[DeferredRead] = []
        for sequence, tree, verification in steps:
            if not sequence.draws_whole_trees:
                walks[sequence] = sequence.rule(tree, verification.logits, sequence.sampler)
                continue
            draws = TreeDraws(tree, verification.logits, sequence.sampler)
            reads.append(DeferredRead(draws.numbers, draws.read))
            if isinstance(sequence.drafter, DraftsAhead):
                ahead = sequence.drafter.draft_ahead(verification, draws)
                reads += [] if ahead is None else [ahead]
            walks[sequence] = walk(tree, draws)
        if reads:
            _read(reads)
        return walks

    def _accept(self, sequence: Sequence, tree: TokenTree, verification: Verification, walked: Walk) -> list[int]:
        path, tokens = [], []
        for node, drawn in walked:
            path.append(node)
            tokens.append(sequence.sampler.take(drawn))
            if sequence.took(tokens[-1]):
                break
        sequence.cache.keep(path)
        sequence.drafter.commit(sequence.cache, verification, path, tokens)
        sources = [tree.sources[node] for node in path[1:]]
        sequence.statistics.count_step(len(tree), tree.depth, sources, len(tokens))
        if sequence.done:
            sequence.drafter.finish(sequence.statistics)
        return tokens


def _read(reads: list[DeferredRead]) -> None:
    """Wait for the device once, and hand each its numbers."""
    numbers = download(torch.cat([read.numbers.double() for read in reads]))
    start = 0
    for read in reads:
        end = start + len(read.numbers)
        read.receive(numbers[start:end])
        start = end


@contextmanager
def _failure_of(sequence: Sequence) -> Iterator[None]:
    """An exception in this block is this sequence's own and ends it; memory that runs out is everybody's."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        sequence.error = error
