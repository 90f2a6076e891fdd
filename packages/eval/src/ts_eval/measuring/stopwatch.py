"""Where a generation's time goes: the stages that the decoder tells of, timed while it runs."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from decoder.timings import listening

FORWARDS = ("verify", "draft")
PARTS = (*FORWARDS, "scoring", "sampling", "rest")
"""What a step is made of.

- ``verify``: passes of the model over tree and full cache; what a cost-tuned method measures on its way is among them.
- ``draft``: other passes, of the model or the small one over a draft cache, of heads, of embeddings, and of the
  language-model head for drafts. Where the native library runs heads, scoring is a part of that.
- ``scoring``: penalty, filters and noise on drafts.
- ``sampling``: the same on verified nodes, and the choice of their tokens.
- ``rest``: all else, such as trees, n-grams, caches, ranks of candidates, the final norm of drafts, statistics, text.

The first two are model forwards, the others bookkeeping.
"""


class Stopwatch:
    """The seconds that one generation's steps take, and of them those of each part but ``rest``.

    Clocks are read when the device has done all it was asked for, so that on CUDA nothing overlaps while parts are
    told apart: their sum is then more than an unwatched step takes.

    Args:
        wait: returns once the device has done all it was asked for.
        parts: tell the parts apart; without it only the whole is timed.
        leading: steps that come before the clock starts, as those do in which a pass is recorded.
        trace: a context around the steps that are timed.

    Attributes:
        seconds, steps, tokens: of the steps that were timed; those of the whole are ``seconds["step"]``.
    """

    def __init__(
        self,
        wait: Callable[[], None],
        parts: bool,
        leading: int = 0,
        trace: AbstractContextManager | None = None,
    ):
        self.wait, self.leading, self.trace = wait, leading, trace
        self.seconds: dict[str, float] = {}
        self.steps = self.tokens = 0
        self._parts = PARTS[:-1] if parts else ()
        self._began = self._ended = 0.0
        self._depth, self._start = 0, 0.0  # of stages that are parts, within each other
        self._ahead, self._stack = leading, ExitStack()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time what is generated in this block."""
        with self._stack, listening(self):
            yield
            if not self.steps:
                late = f"its step {self.leading + 1}, with which the clock starts"
                raise ValueError(f"new_tokens must be more: a generation was over before {late}")
            self.seconds["step"] = self._ended - self._began

    def _clock(self) -> float:
        self.wait()
        return time.perf_counter()

    def begin(self, stage: str) -> None:
        if stage == "step" and not self._ahead and not self.steps:
            self.seconds = dict.fromkeys(self._parts, 0.0)
            self._clock()
            if self.trace is not None:
                self._stack.enter_context(self.trace)
            self._began = self._clock()
        elif stage in self._parts:
            # Of stages within each other the outermost is timed.
            self._depth += 1
            if self._depth == 1:
                self._start = self._clock()

    def end(self, stage: str, result: object) -> None:
        if stage == "step" and self._ahead:
            self._ahead -= 1
        elif stage == "step" and isinstance(result, dict):
            if all(sequence.done for sequence in result):
                self.wait()
            # What follows the last step, such as freeing its caches, is none.
            self._ended = time.perf_counter()
            self.steps += 1
            self.tokens += sum(map(len, result.values()))
        elif stage in self._parts:
            self._depth -= 1
            if not self._depth:
                self.seconds[stage] = self.seconds.get(stage, 0.0) + self._clock() - self._start
