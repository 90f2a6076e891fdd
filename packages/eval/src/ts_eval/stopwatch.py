"""Where a generation's time goes: the decoder's own functions, timed from outside while they run."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps

from decoder.draft_heads import DraftHeads
from decoder.drafters.native_levels import NativeLevels
from decoder.eagle3.draft_model import Eagle3DraftModel
from decoder.engine import Engine
from decoder.model.target import Target
from decoder.sampling.sampler import Sampler, TreeDraws
from decoder.sequence import Sequence

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

_WATCHED = (
    (Target, "forward", "verify"),
    (Target, "draft", "draft"),
    (Target, "head", "draft"),
    (Target, "embed", "draft"),
    (DraftHeads, "forward", "draft"),
    (DraftHeads, "advance", "draft"),
    (NativeLevels, "fill", "draft"),
    (Eagle3DraftModel, "combine", "draft"),
    (Eagle3DraftModel, "project", "draft"),
    (Eagle3DraftModel, "finish", "draft"),
    (Sampler, "draft_scores", "scoring"),
    (Sampler, "draft_choice", "scoring"),
    (Sampler, "branch_scores", "scoring"),
    (Sampler, "draw", "sampling"),
    (TreeDraws, "__init__", "sampling"),
)


@contextmanager
def replaced(owner: type, name: str, function: Callable) -> Iterator[None]:
    """``owner.name`` is ``function`` until the end of the block."""
    original = owner.__dict__[name]
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


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
        self._watched = _WATCHED if parts else ()
        self._began = self._ended = 0.0
        self._inside = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time what is generated in this block."""
        with ExitStack() as stack:
            stack.enter_context(replaced(Engine, "decode", self._stepping(Engine.decode, stack)))
            for owner, name, part in self._watched:
                stack.enter_context(replaced(owner, name, self._timed(owner.__dict__[name], part)))
            yield
            if not self.steps:
                late = f"its step {self.leading + 1}, with which the clock starts"
                raise ValueError(f"new_tokens must be more: a generation was over before {late}")
            self.seconds["step"] = self._ended - self._began

    def _clock(self) -> float:
        self.wait()
        return time.perf_counter()

    def _stepping(self, decode: Callable, stack: ExitStack) -> Callable:
        ahead = self.leading

        @wraps(decode)
        def stepped(engine: Engine, sequences: list[Sequence]) -> dict[Sequence, list[int]]:
            nonlocal ahead
            if ahead or not sequences:
                ahead -= bool(sequences)
                return decode(engine, sequences)
            if not self.steps:
                self.seconds = {part: 0.0 for _, _, part in self._watched}
                self._clock()
                if self.trace is not None:
                    stack.enter_context(self.trace)
                self._began = self._clock()
            tokens = decode(engine, sequences)
            if all(sequence.done for sequence in sequences):
                self.wait()
            # What follows the last step, such as freeing its caches, is none.
            self._ended = time.perf_counter()
            self.steps += 1
            self.tokens += sum(map(len, tokens.values()))
            return tokens

        return stepped

    def _timed(self, function: Callable, part: str) -> Callable:
        @wraps(function)
        def timed(*args, **kwargs):
            # Of functions that call each other the outermost is timed.
            if self._inside:
                return function(*args, **kwargs)
            self._inside, start = True, self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + self._clock() - start
                self._inside = False

        return timed
