"""The engine decodes all running sequences together, step by step: schedule, draft, verify, accept, commit.

Callers run `Engine.step`. Who takes part in one is decided by the `Scheduler`; the pipeline itself is `Engine.decode`.
"""

import time
from collections import deque
from collections.abc import Iterable

import torch

from decoder.backends.base import DEEPEST, PassOutput
from decoder.backends.transfers import download
from decoder.drafters.base import DeferredRead, DraftsAhead
from decoder.drafters.levels import fill_together
from decoder.model.target import Target
from decoder.parallel.ranks import Ranks, linked
from decoder.prefix_reuse import PrefixReuse
from decoder.sampling.acceptance import Step, Walk, walk
from decoder.sampling.constraint_path import keep_within
from decoder.sampling.token_tree import TokenTree
from decoder.sampling.tree_draws import TreeDraws
from decoder.scheduler import Fits, Scheduler, failure_of
from decoder.sequence import Sequence
from decoder.timings import stage


class Engine:
    """Decodes sequences together: a finished one leaves, a waiting one joins.

    With exact acceptance a sequence follows from the target and its sampler alone. It depends neither on its drafter
    nor on the sequences that run beside it.

    Args:
        target: the model.
        fits, prefixes, short_steps: as for `Scheduler`.

    Attributes:
        scheduler: who runs and who waits.
    """

    def __init__(
        self,
        target: Target,
        fits: Fits | None = None,
        prefixes: PrefixReuse | None = None,
        short_steps: bool = False,
    ):
        self.target, self.scheduler = target, Scheduler(target, fits, prefixes, short_steps)

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have joined."""
        return self.scheduler.running

    @property
    def waiting(self) -> deque[Sequence]:
        """The sequences that have not begun."""
        return self.scheduler.waiting

    @property
    def decoding(self) -> int:
        """How many sequences a step decodes."""
        return self.scheduler.decoding

    @property
    def busy(self) -> bool:
        """Whether there is something to do in a step."""
        return self.scheduler.busy

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it joins in the first step that has room for it."""
        self.scheduler.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Remove a sequence, whether it is running or waiting; the others go on."""
        self.scheduler.cancel(sequence)

    @torch.inference_mode()
    def step(self) -> list[tuple[Sequence, list[int]]]:
        """Give every running sequence its next tokens, one or more, but for those that wait for long work.

        At first, waiting sequences join as long as there is room. Their prompts are prefilled, a long one in several
        steps where others are to get tokens meanwhile. In the end, those that are done leave. A sequence whose own
        hook, drafter or logits raise an exception leaves with that as its `Sequence.error`, and the others go on.

        Returns:
            Each sequence that was decoded in this step with its new tokens, the finished ones included. With short
            steps there may be none.
        """
        with linked():
            scheduled = self.scheduler.schedule()
            self.target.bitwise.check()
            live = [sequence for sequence in scheduled if not sequence.done]
            tokens = self.decode(live) if live else {}
        self.scheduler.release()
        return [(sequence, tokens.get(sequence, [])) for sequence in scheduled]

    @stage("step")
    def decode(self, sequences: list[Sequence]) -> dict[Sequence, list[int]]:
        """The pipeline of a step, for sequences that wait for nothing: the new tokens of each.

        It is separate from `step` so that it can be timed and profiled without the prefill of sequences that join.
        """
        start = time.perf_counter()
        with self.target.patched():
            trees = self._draft(sequences)
            if not trees:
                return {}
            verifications = self._verify(trees)
            walks = self._accept(trees, verifications)
        tokens = {}
        for sequence, walked in walks.items():
            if sequence.error is None:
                with failure_of(sequence):
                    tokens[sequence] = self._commit(sequence, trees[sequence], verifications[sequence], walked)
        # The tokens have been read from the device, so the clock needs no further synchronisation.
        seconds = time.perf_counter() - start
        for sequence in tokens:
            sequence.statistics.count_decoding(seconds, len(tokens))
        return tokens

    @stage("propose")
    def _draft(self, sequences: list[Sequence]) -> dict[Sequence, TokenTree]:
        """The tree that each sequence's drafter proposes; a sequence whose drafter fails is left out."""
        # A step gives one token more than it accepts, and no pass may read beyond the model's last position.
        depths = {sequence: min(sequence.remaining - 1, DEEPEST) for sequence in sequences}
        self._fill_levels(depths)
        trees = {}
        for sequence, depth in depths.items():
            if sequence.error is None:
                with failure_of(sequence):
                    tree = sequence.drafter.propose(sequence.cache, sequence.sampler, depth)
                    path, drafter = sequence.sampler.constraint, sequence.drafter
                    if path is not None and not getattr(drafter, "keeps_within", False):
                        # Plain decoding drafts nothing, forced tokens neither.
                        keep_within(tree, path, depth if sequence.most_nodes > 1 else 0, sequence.most_nodes)
                    tree.prune(depth, self.target.most_nodes)
                    trees[sequence] = tree
        return trees

    def _fill_levels(self, depths: dict[Sequence, int]) -> None:
        """Run the draft heads of all sequences as one, before these propose."""
        wanted = []
        for sequence, depth in depths.items():
            if sequence.wants_levels is not None:
                with failure_of(sequence):
                    wanted.append(sequence.wants_levels(sequence.cache, sequence.sampler, depth))
        fill_together([one for one in wanted if one is not None])

    def _verify(self, trees: dict[Sequence, TokenTree]) -> dict[Sequence, PassOutput]:
        """Run the trees through the model, over the cache of each sequence."""
        observe = any(sequence.drafter.observed_queries for sequence in trees)
        caches = [sequence.cache for sequence in trees]
        return dict(zip(trees, self.target.forward(list(trees.values()), caches, observe), strict=True))

    @stage("accept")
    def _accept(
        self, trees: dict[Sequence, TokenTree], verifications: dict[Sequence, PassOutput]
    ) -> dict[Sequence, Walk]:
        """The walk of each sequence along the tokens that the target chooses; see `sampling.acceptance`.

        A sequence whose drafter fails has none.

        For sequences with `Sequence.draws_whole_trees`, the draws of all nodes and what drafters need for the next step
        are launched on the device first. The host then waits once and reads the results of all of them together.
        """
        walks: dict[Sequence, Walk] = {}
        reads: list[DeferredRead] = []
        for sequence, tree in trees.items():
            verification = verifications[sequence]
            if not sequence.draws_whole_trees:
                walks[sequence] = sequence.rule(tree, verification.logits, sequence.sampler)
                continue
            with failure_of(sequence):
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
    def _commit(self, sequence: Sequence, tree: TokenTree, verification: PassOutput, walked: Walk) -> list[int]:
        """Append the walk's tokens to the sequence, until it ends, and commit the path to the cache and the drafter."""
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


def _follow(sequence: Sequence, walked: Iterable[Step]) -> list[Step]:
    """Append the tokens of a walk to the sequence until it ends; returns the steps that were taken."""
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
