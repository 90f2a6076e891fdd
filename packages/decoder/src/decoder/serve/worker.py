"""The one thread that owns the model: it decodes the choices of all requests together, step by step.

Between two steps requests join, leave and stop. So that they never wait long, no step holds much of what takes long.
"""

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from decoder import sequence as sequences
from decoder.admission import Admission, memory_for_caches
from decoder.arguments import Arguments
from decoder.constraints.base import ConstraintError
from decoder.decoder import Decoder
from decoder.model.loading import out_of_memory
from decoder.outputs import GenerationOutput
from decoder.prompt_scores import PromptLogprob
from decoder.serve.errors import ApiError, stopping
from decoder.stats import Statistics

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """What a step adds to a choice.

    Attributes:
        choice: its index in the request.
        token_ids, text: as in `decoder.Chunk`.
        logprobs, top_logprobs: of the tokens, if asked for.
        output: the whole text, in the last piece.
        prompt_logprobs: of the prompt, if asked for, see `GenerationOutput`.
    """

    choice: int
    token_ids: list[int]
    text: str
    logprobs: list[float] | None
    top_logprobs: list[list[tuple[int, float]]] | None
    output: GenerationOutput | None
    prompt_logprobs: list[PromptLogprob | None] | None


class Job:
    """One request: the arguments of its choices, and where their pieces go.

    Args:
        arguments: one for each choice.
        deliver: called in the worker's thread with each `Piece`, or with the error that ends the whole request.
        in_pieces: whether what each step adds to a choice is a piece; else it has one, at its end.
    """

    def __init__(
        self, arguments: Sequence[Arguments], deliver: Callable[[Piece | ApiError], None], in_pieces: bool = True
    ):
        self.arguments, self.deliver, self.in_pieces = list(arguments), deliver, in_pieces
        self.over = False
        """Whether nobody waits for its pieces any more: it was cancelled, or an error has ended it."""

    def fail(self, error: ApiError) -> None:
        """End the request, unless it is over."""
        if not self.over:
            self.over = True
            self.deliver(error)


class Worker:
    """Decodes what is submitted to it, in the order of its arrival, in a thread of its own.

    Args:
        dec: the decoder, which no other thread may use meanwhile.
        max_batch: how many choices are decoded together at most.
        max_queue: how many choices may wait beyond these.
        finished: called in the worker's thread with the statistics of each choice that has ended, by whatever cause.
        own_thread: whether there is that thread; else the caller takes each `turn`, and what takes long is not cut
            short for requests that come meanwhile.
    """

    def __init__(
        self,
        dec: Decoder,
        max_batch: int,
        max_queue: int,
        finished: Callable[[Statistics], None] = lambda _: None,
        own_thread: bool = True,
    ):
        self.dec, self.max_queue, self._finished = dec, max_queue, finished
        self.admission = Admission(max_batch, memory_for_caches(dec.target.device, dec.prefixes))
        self._own_thread = own_thread
        self._engine = dec.engine(self.admission, short_steps=own_thread)
        self._waiting: deque[tuple[Job, int]] = deque()
        self._running: dict[sequences.Sequence, tuple[Job, int]] = {}
        self._changed = threading.Condition()
        self._stop_at: float | None = None
        # A new thread starts with another number of threads for products, and so with other roundings.
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are taken: it runs, and has not been told to stop."""
        return (self._thread.is_alive() or not self._own_thread) and self._stop_at is None

    @property
    def running(self) -> int:
        """How many choices are being decoded."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many choices wait."""
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Queue a request; raises ApiError 429 if there is no room for it, and 503 once the server is stopping."""
        with self._changed:
            if not self.alive:
                raise stopping()
            most = self.admission.max_batch + self.max_queue
            if len(job.arguments) > most:
                words = f"n: {len(job.arguments)} texts are asked for, and there is never room for more than {most}"
                raise ApiError(400, f"{words}: ask for fewer", "n")
            if len(self._running) + len(self._waiting) + len(job.arguments) > most:
                words = f"there is room for {self.admission.max_batch} running and {self.max_queue} waiting texts"
                raise ApiError(429, f"{words}, which is taken: send the request again later", code="queue_full")
            self._waiting.extend((job, choice) for choice in range(len(job.arguments)))
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Forget a request: what waits of it leaves at once, what runs before the next step."""
        with self._changed:
            job.over = True
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not job)
            self._changed.notify()

    def stop(self, grace: float) -> None:
        """Take no more requests; those that have not ended after ``grace`` seconds are told so, and the thread ends."""
        with self._changed:
            end = time.monotonic() + grace
            self._stop_at = end if self._stop_at is None else min(end, self._stop_at)
            self._changed.notify()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        while self.turn():
            pass

    def turn(self) -> bool:
        """Let choices leave and join, and take a step; False when there is none to come. Waits for work."""
        if not self._prepare():
            return False
        try:
            self._step()
        except Exception as error:
            self._recover(error)
        return True

    def _prepare(self) -> bool:
        """Wait for work, let cancelled choices leave and waiting ones join; False when the thread is to end."""
        with self._changed:
            while not self._waiting and not self._engine.busy and self._stop_at is None:
                self._changed.wait()
            if self._stop_at is not None and time.monotonic() >= self._stop_at:
                self._fail_all(stopping())
            if self._stop_at is not None and not self._waiting and not self._running:
                return False
            joining: list[tuple[Job, int]] = []
            for sequence in [one for one, (job, _) in self._running.items() if job.over]:
                self._leave(sequence)
            while self._waiting and len(self._running) + len(joining) < self.admission.max_batch:
                joining.append(self._waiting.popleft())
        for job, choice in joining:
            if not job.over:
                self._join(job, choice)
        return True

    def _join(self, job: Job, choice: int) -> None:
        """Make a choice's sequence; not before it may run, since one that waits already holds its drafter's index."""
        arguments = job.arguments[choice]
        try:
            sequence = self.dec.sequence(self._engine, arguments)
        except Exception as error:
            # What a method lacks, for instance a draft model, shows only now.
            job.fail(ApiError(400, str(error)) if isinstance(error, ValueError) else _told(error))
            return
        self.admission.plan(sequence, partial(self.dec.cache_bytes, arguments))
        with self._changed:
            self._running[sequence] = job, choice
        self._engine.add(sequence)

    def _leave(self, sequence: sequences.Sequence) -> None:
        """Forget a sequence; its caches go with the last reference to it."""
        self._engine.cancel(sequence)
        del self._running[sequence]
        self._finished(sequence.statistics)

    def _step(self) -> None:
        for sequence, tokens in self._engine.step():
            job, choice = self._running[sequence]
            if sequence.done:
                with self._changed:
                    self._leave(sequence)
            if sequence.error is not None:
                job.fail(_told(sequence.error))
            elif not job.over and (sequence.done or job.in_pieces):
                chunk = sequence.chunk(tokens if job.in_pieces else sequence.token_ids)
                logprobs = chunk.logprobs, chunk.top_logprobs
                scores = sequence.prompt_scores
                of_prompt = None if scores is None else scores.found
                job.deliver(Piece(choice, chunk.token_ids, chunk.text, *logprobs, chunk.output, of_prompt))

    def _recover(self, error: Exception) -> None:
        """Memory ran out, or there is a fault in a step: whatever ran has failed, what waits goes on."""
        told = _told(error)
        with self._changed:
            for sequence, (job, _) in self._running.items():
                self._finished(sequence.statistics)
                job.fail(told)
            self._running.clear()
            self._engine = self.dec.engine(self.admission, short_steps=self._own_thread)

    def _fail_all(self, error: ApiError) -> None:
        for job, _ in [*self._running.values(), *self._waiting]:
            job.fail(error)
        for sequence in list(self._running):
            self._leave(sequence)
        self._waiting.clear()


def _told(error: Exception) -> ApiError:
    """What a client is told of an exception in a generation; the log gets no message, only where it was raised."""
    if out_of_memory(error):
        logger.error("memory ran out")
        return ApiError(503, "the server ran out of memory: ask for less, or later", code="out_of_memory")
    if isinstance(error, ConstraintError):
        return ApiError(400, str(error), code="constraint_failed")
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("a text failed with %s at\n%s", type(error).__name__, where)
    return ApiError(500, f"the text could not be generated: {type(error).__name__}", code="generation_failed")
