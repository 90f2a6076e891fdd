"""The scheduler: which sequences run, which wait, and what takes longer than a step, in parts between two steps.

Such long work is a prompt, what a drafter does before a step, copies of caches, and weights that have changed.
"""

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from decoder.drafters.base import feature_reader
from decoder.model.loading import out_of_memory
from decoder.model.target import Target
from decoder.parallel.ranks import is_lost
from decoder.prefill import prefill
from decoder.prefix_reuse import PrefixReuse
from decoder.sequence import Sequence
from decoder.work import Work, finish, timed

logger = logging.getLogger(__name__)

_TOKENS = 512  # of long work, after which a step takes no more where sequences wait for tokens
_OTHERS_TOKENS = 3  # in chunks of a prompt: after so many for others some go to the sequence that came first

Fits = Callable[[list[Sequence], Sequence], bool]
"""Tells whether a waiting sequence (the second argument) may join those that are running."""


@dataclass
class _Pending:
    """Work that a sequence waits for, and how many tokens are left of it."""

    work: Work[None]
    left: int


class Scheduler:
    """Decides before each step which sequences it decodes.

    Args:
        target: the model.
        fits: tells whether a waiting sequence may join, by its arguments alone. It is not asked while nothing runs, so
            that any sequence can begin alone. Where sequences have grown so that the last one would not be let in any
            more, that one waits again (preemption), and a sequence of open length that would not even be let in alone
            ends. None lets every sequence join at once.
        prefixes: where sequences begin and what becomes of their caches; None to prefill every prompt as a whole.
        short_steps: whether no step takes more than a short chunk of long work, so that its caller can let others join
            and leave between two chunks. Else sequences that are decoded wait for little of it at a time, and where
            there are none all of it is done.

    Attributes:
        running: the sequences that have joined.
        waiting: the sequences that have not begun, in the order in which they will.
    """

    def __init__(
        self,
        target: Target,
        fits: Fits | None = None,
        prefixes: PrefixReuse | None = None,
        short_steps: bool = False,
    ):
        self.target, self.fits, self.prefixes, self.short_steps = target, fits, prefixes, short_steps
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._pending: dict[Sequence, _Pending] = {}  # of those that run, in the order in which they came
        self._weights: Work[None] | None = None  # being prepared: nobody runs before
        self._leaving: dict[Sequence, Work[None]] = {}  # whose caches are being copied
        self._tokens_of_others = 0  # of long work, since the sequence that came first had some

    @property
    def decoding(self) -> int:
        """How many sequences a step decodes: those that run, and wait for no work."""
        return len(self.running) - len(self._pending)

    @property
    def busy(self) -> bool:
        """Whether there is something to do in a step."""
        return bool(self.running or self.waiting or self._leaving)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it joins in the first step that has room for it."""
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Remove a sequence, whether it is running or waiting; the others go on."""
        if sequence in self.running:
            self.running.remove(sequence)
            if self._pending.pop(sequence, None) is None:
                self._keep_prefix(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Sequence]:
        """Let sequences wait again or join, and do some of what they wait for; returns those that need not wait.

        Some of these may have failed by now.
        """
        self._preempt()
        self._admit()
        self._go_on_copying()
        if self._prepare_weights():
            self._ask_for_work()
            self._go_on()
        return [sequence for sequence in self.running if sequence not in self._pending]

    def release(self) -> None:
        """Let those that are done leave, behind a step."""
        done = [sequence for sequence in self.running if sequence.done]
        self.running = [sequence for sequence in self.running if not sequence.done]
        for sequence in done:
            self._keep_prefix(sequence)

    def _preempt(self) -> None:
        """Let those that joined last wait again while all together would outgrow the memory.

        Only caches of sequences of open length grow. What such a sequence had in its cache is prefilled when it joins
        again, so it loses time and no token. One that outgrows the memory alone ends.
        """
        if self.fits is None or not any(sequence.cache.growable for sequence in self.running):
            return
        failed = []
        while len(self.running) > 1 and self.running[-1].renew and not self.fits(self.running[:-1], self.running[-1]):
            sequence = self.running.pop()
            self._pending.pop(sequence, None)
            with failure_of(sequence):
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
                with failure_of(alone):
                    alone.end()
        self.running += failed

    def _grows(self, sequence: Sequence) -> bool:
        """Whether the cache must grow for the next step."""
        room = sequence.cache.capacity - sequence.cache.length
        return sequence.cache.growable and room < self.target.width(sequence.most_nodes)

    def _admit(self) -> None:
        """Let waiting sequences join as long as there is room."""
        while self.waiting:
            # Caches that are being copied still take their memory.
            others = [*self.running, *self._leaving]
            if others and self.fits is not None and not self.fits(others, self.waiting[0]):
                return
            sequence = self.waiting.popleft()
            if all(other.done for other in self.running):
                self._weights = self.target.refreshing()
            self.running.append(sequence)
            if not sequence.done:
                work = prefill(self.target, sequence, self.prefixes, self.short_steps)
                self._pending[sequence] = _Pending(work, len(sequence.sampler.context))

    def _prepare_weights(self) -> bool:
        """Go on with taking in how the user has changed the model; returns whether that is done."""
        try:
            for progress in self._weights or ():
                if self.short_steps and progress.left:
                    return False
        except Exception as error:
            if _of_all(error):
                raise
            for sequence in self._pending:
                sequence.error = error
            self._pending.clear()
        self._weights = None
        return True

    def _ask_for_work(self) -> None:
        """Let those wait whose drafters have long work to do before their next step."""
        for sequence in self.running:
            if sequence.long_work is None or sequence.done or sequence in self._pending:
                continue
            with failure_of(sequence):
                work = sequence.long_work(sequence.cache)
                if work is not None:
                    self._pending[sequence] = _Pending(timed(work, sequence.statistics.count_decoding), 0)

    def _go_on(self) -> None:
        """Go on with the work that sequences wait for.

        Beside sequences that are decoded it is a part of a long prompt in each step, so that these do not wait for all
        of it. The work of which the least is left goes first, so that a short prompt does not wait for a long one. But
        now and then it is that of the sequence that came first, so that it does not wait for ever.
        """
        tokens, chunk = 0, self.target.prefill_chunk(self.short_steps)
        while self._pending and not self._enough(tokens):
            oldest = next(iter(self._pending))
            shortest = min(self._pending, key=lambda sequence: self._pending[sequence].left)
            sequence = oldest if self._tokens_of_others >= _OTHERS_TOKENS * chunk else shortest
            done = self._do_part(sequence)
            tokens += done
            self._tokens_of_others = 0 if sequence is oldest else self._tokens_of_others + done

    def _enough(self, tokens: int) -> bool:
        """Whether a step takes no more long work than so many ``tokens``."""
        if self.short_steps:
            return tokens >= self.target.prefill_chunk(True)
        waiting = any(not sequence.done and sequence not in self._pending for sequence in self.running)
        return waiting and tokens >= _TOKENS

    def _do_part(self, sequence: Sequence) -> int:
        """Do the next part of what a sequence waits for; returns how many tokens it had."""
        pending, tokens = self._pending[sequence], 0
        try:
            with failure_of(sequence), self.target.patched():
                for progress in pending.work:
                    tokens += progress.done
                    if progress.left:
                        pending.left = progress.left
                        return tokens
        except BaseException:
            # No sequence of its own can be blamed. This one cannot go on, its work is not whole.
            self.cancel(sequence)
            raise
        del self._pending[sequence]
        return tokens

    def _keep_prefix(self, sequence: Sequence, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Keep the cache of a sequence that leaves, unless a fault ended it, or the program ends."""
        # `ending` is bound here, since a program that ends takes this module's names away first.
        if self.prefixes is None or sequence.error is not None or ending():
            return
        work = self.prefixes.keeping(sequence.sampler.context, sequence.cache, feature_reader(sequence.drafter))
        if self.short_steps:
            self._leaving[sequence] = work
        else:
            with torch.inference_mode():
                finish(work)

    def _go_on_copying(self) -> None:
        """Copy a part of each cache that is to be kept."""
        for sequence, work in list(self._leaving.items()):
            if next(work, None) is None:
                del self._leaving[sequence]


@contextmanager
def failure_of(sequence: Sequence) -> Iterator[None]:
    """An exception in this block ends this sequence alone, unless memory has run out or another process is lost."""
    try:
        yield
    except Exception as error:
        if _of_all(error):
            raise
        sequence.error = error


def _of_all(error: Exception) -> bool:
    """Whether an exception tells that no sequence can go on."""
    return out_of_memory(error) or is_lost(error)
