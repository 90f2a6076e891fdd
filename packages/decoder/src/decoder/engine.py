"""The engine decodes all running texts together, step by step: propose, verify, accept, commit.

Callers run `Engine.step`. The pipeline itself is `Engine.decode`.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

import torch

from decoder.drafters.base import DeferredRead, DraftsAhead
from decoder.drafters.levels import fill_together
from decoder.kernels.tails import DEPTH
from decoder.kernels.transfers import download
from decoder.model.loading import out_of_memory
from decoder.model.target import Target
from decoder.model.verification import Verification
from decoder.parallel.ranks import Ranks, is_lost, linked
from decoder.prefill import prefill
from decoder.prefix_reuse import PrefixReuse
from decoder.sampling.acceptance import Step, Walk, walk
from decoder.sampling.sampler import TreeDraws
from decoder.sampling.token_tree import TokenTree
from decoder.sequence import Sequence
from decoder.timings import stage

logger = logging.getLogger(__name__)

_PROMPT_TOKENS = 512  # of prompts, after which a step takes no more where texts wait for tokens
_CHUNKS_TO_OLDEST = 4  # after so many chunks of prompts one goes to the prompt that came first

Fits = Callable[[list[Sequence], Sequence], bool]
"""Tells whether a waiting sequence (the second argument) may join those that are running."""


class Engine:
    """Decodes sequences together: a finished one leaves, a waiting one joins.

    With exact acceptance a text follows from the target and its sampler alone. It depends neither on its drafter nor on
    the texts that run beside it.

    Args:
        target: the model.
        fits: tells whether a waiting sequence may join, by its arguments alone. It is not asked while nothing runs, so
            that any text can begin alone. Where texts have grown so that the last one would not be let in any more,
            that one waits again (preemption), and a text of open length that would not even be let in alone ends. None
            lets every sequence join at once.
        prefixes: where texts begin and what becomes of their caches; None to prefill every prompt as a whole.

    Attributes:
        running: the sequences that steps decode.
        waiting: the sequences that have not begun, in the order in which they will.
    """

    def __init__(self, target: Target, fits: Fits | None = None, prefixes: PrefixReuse | None = None):
        self.target, self.fits, self.prefixes = target, fits, prefixes
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._prefills: dict[Sequence, Generator[int, None, int]] = {}  # of those that run, what is left
        self._chunks = 0  # of prompts, so far

    @property
    def decoding(self) -> int:
        """How many texts a step decodes: those that run, and whose prompts are prefilled."""
        return len(self.running) - len(self._prefills)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it joins in the first step that has room for it."""
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Remove a sequence, whether it is running or waiting; the others go on."""
        if sequence in self.running:
            self.running.remove(sequence)
            if self._prefills.pop(sequence, None) is None:
                self._keep_prefix(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    @torch.inference_mode()
    def step(self) -> list[tuple[Sequence, list[int]]]:
        """Give every running sequence its next tokens, one or more.

        At first, waiting sequences join as long as there is room. Their prompts are prefilled, a long one in several
        steps where others are to get tokens meanwhile. In the end, those that are done leave. A sequence whose own
        hook, drafter or logits raise an exception leaves with that as its `Sequence.error`, and the others go on.

        Returns:
            Each sequence that was decoded in this step with its new tokens, the finished ones included.
        """
        with linked():
            self._preempt()
            self._admit()
            self._prefill()
            self.target.bitwise.check()
            stepped = [sequence for sequence in self.running if sequence not in self._prefills]
            live = [sequence for sequence in stepped if not sequence.done]
            tokens = self.decode(live) if live else {}
        self.running = [sequence for sequence in self.running if not sequence.done]
        for sequence in stepped:
            if sequence.done:
                self._keep_prefix(sequence)
        return [(sequence, tokens.get(sequence, [])) for sequence in stepped]

    def _preempt(self) -> None:
        """Let those that joined last wait again while all together would outgrow the memory.

        Only caches of texts of open length grow. What such a text had in its cache is prefilled when it joins again, so
        it loses time and no token. One that outgrows the memory alone ends.
        """
        if self.fits is None or not any(sequence.cache.growable for sequence in self.running):
            return
        failed = []
        while len(self.running) > 1 and self.running[-1].renew and not self.fits(self.running[:-1], self.running[-1]):
            sequence = self.running.pop()
            self._prefills.pop(sequence, None)
            with _failure_of(sequence):
                sequence.preempt()
            if sequence.error is None:
                self.waiting.appendleft(sequence)
            else:
                failed.append(sequence)
            # Nobody else is to get the buffers that it had, and they are not counted.
            self.target.pool.clear()
        if len(self.running) == 1 and self._grows(alone := self.running[0]):
            alone.planned_positions = 0  # what it needed beside others
            if not self.fits([], alone):
                logger.warning("a text of open length has ended where its cache would outgrow the memory")
                with _failure_of(alone):
                    alone.end()
        self.running += failed

    def _grows(self, sequence: Sequence) -> bool:
        """Whether the cache must grow for the next step."""
        room = sequence.cache.capacity - sequence.cache.length
        return sequence.cache.growable and room < self.target.slots(sequence.drafter.max_nodes)

    def _admit(self) -> None:
        """Let waiting sequences join as long as there is room."""
        while self.waiting:
            if self.running and self.fits is not None and not self.fits(self.running, self.waiting[0]):
                return
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            if not sequence.done:
                with _failure_of(sequence):
                    if self.running == [sequence]:
                        self.target.refresh_weights()
                    self._prefills[sequence] = prefill(self.target, sequence, self.prefixes)

    def _prefill(self) -> None:
        """Go on with the prompts of those that have joined.

        Beside texts that are decoded it is a part of a long prompt in each step, so that these do not wait for all of
        it. The prompt of which the least is left goes first, so that a short one does not wait for a long one. But each
        fourth chunk is of the one that came first, so that it does not wait for ever.
        """
        tokens = 0
        while self._prefills and not (tokens >= _PROMPT_TOKENS and self._others_wait()):
            self._chunks += 1
            oldest = self._chunks % _CHUNKS_TO_OLDEST == 0
            sequence = next(iter(self._prefills)) if oldest else min(self._prefills, key=_left_of_prompt)
            rest = self._prefills[sequence]
            try:
                with _failure_of(sequence), self.target.patched():
                    try:
                        tokens += next(rest)
                        continue
                    except StopIteration as end:
                        tokens += end.value
            except BaseException:
                # No text of its own can be blamed. This one cannot go on, its prompt is not whole.
                self.cancel(sequence)
                raise
            del self._prefills[sequence]

    def _others_wait(self) -> bool:
        """Whether texts wait for tokens whose prompts are prefilled."""
        return any(not sequence.done and sequence not in self._prefills for sequence in self.running)

    def _keep_prefix(self, sequence: Sequence) -> None:
        """Keep the cache of a sequence that leaves, unless a fault ended it, or the program ends."""
        if self.prefixes is not None and sequence.error is None and not sys.is_finalizing():
            with torch.inference_mode():
                self.prefixes.keep(sequence.sampler.context, sequence.cache)

    @stage("step")
    def decode(self, sequences: list[Sequence]) -> dict[Sequence, list[int]]:
        """The pipeline of a step, for sequences whose prompts are prefilled: the new tokens of each.

        It is separate from `step` so that it can be timed and profiled without the prefill of sequences that join.
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
            if sequence.error is not None:
                continue
            with _failure_of(sequence):
                tokens[sequence] = self._accept(sequence, tree, verification, walks[sequence])
        # The tokens have been read from the device, so the clock needs no further synchronisation.
        seconds = time.perf_counter() - start
        for sequence in tokens:
            sequence.statistics.decode_seconds += seconds
            sequence.statistics.shared_seconds += seconds / len(tokens)
        return tokens

    @stage("propose")
    def _propose(self, sequences: list[Sequence]) -> dict[Sequence, TokenTree]:
        """The tree that each sequence's drafter proposes; a sequence whose drafter fails is left out."""
        # A step gives one token more than it accepts, and no pass may read beyond the model's last position.
        depths = {sequence: min(sequence.remaining - 1, DEPTH) for sequence in sequences}
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
            if sequence.wants_levels is not None:
                with _failure_of(sequence):
                    wanted.append(sequence.wants_levels(sequence.cache, sequence.sampler, depth))
        fill_together([one for one in wanted if one is not None])

    @stage("accept")
    def _launch(self, steps: list[tuple[Sequence, TokenTree, Verification]]) -> dict[Sequence, Walk]:
        """The walk of each sequence along the tokens that the target chooses; see `sampling.acceptance`.

        A sequence whose drafter fails has none.

        For sequences with `Sequence.draws_whole_trees`, the draws of all nodes and what drafters need for the next step
        are launched on the device first. The host then waits once and reads the results of all of them together.
        """
        walks: dict[Sequence, Walk] = {}
        reads: list[DeferredRead] = []
        for sequence, tree, verification in steps:
            if not sequence.draws_whole_trees:
                walks[sequence] = sequence.rule(tree, verification.logits, sequence.sampler)
                continue
            with _failure_of(sequence):
                apart = self.target.bitwise.rule is not None
                draws = TreeDraws(tree, verification.logits, sequence.sampler, apart)
                own = [DeferredRead(draws.numbers, draws.read)]
                if isinstance(sequence.drafter, DraftsAhead):
                    drafts = sequence.drafter.draft_ahead(verification, draws)
                    own += [] if drafts is None else [drafts]
                reads += own
                walks[sequence] = walk(tree, draws)
        if reads:
            _read(reads, self.target.ranks)
        return walks

    @stage("commit")
    def _accept(self, sequence: Sequence, tree: TokenTree, verification: Verification, walked: Walk) -> list[int]:
        """Append the walk's tokens to the text, until it ends, and commit the path to the cache and the drafter."""
        ranks = self.target.ranks
        taken = ranks.first(lambda: _follow(sequence, walked))
        if ranks.rank:
            # The walk of rank 0, where this process has drawn nothing.
            _follow(sequence, taken)
        path, tokens = [node for node, _ in taken], [drawn.token for _, drawn in taken]
        sequence.cache.keep(path)
        sequence.drafter.commit(sequence.cache, verification, path, tokens)
        sources = [tree.sources[node] for node in path[1:]]
        sequence.statistics.count_step(len(tree), tree.depth, sources, len(tokens))
        if sequence.done:
            sequence.drafter.finish(sequence.statistics)
        return tokens


def _left_of_prompt(sequence: Sequence) -> int:
    """How many tokens of a prompt have not been prefilled yet."""
    return len(sequence.sampler.context) - sequence.cache.length


def _follow(sequence: Sequence, walked: Iterable[Step]) -> list[Step]:
    """Append the tokens of a walk to the text until it ends; returns the steps that were taken."""
    taken = []
    for step in walked:
        sequence.sampler.take(step[1])
        taken.append(step)
        if sequence.advance(step[1].token):
            break
    return taken


def _read(reads: list[DeferredRead], ranks: Ranks) -> None:
    """Wait for the device once, and hand each deferred read its values."""
    numbers = ranks.agree(download(torch.cat([read.numbers.double() for read in reads])))
    start = 0
    for read in reads:
        end = start + len(read.numbers)
        read.receive(numbers[start:end])
        start = end


@contextmanager
def _failure_of(sequence: Sequence) -> Iterator[None]:
    """An exception in this block ends this sequence alone, unless memory has run out or another process is lost."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error) or is_lost(error):
            raise
        sequence.error = error
