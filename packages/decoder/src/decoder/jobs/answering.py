"""Answers requests of a file with a decoder of this process, as a server would."""

import hashlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from decoder.decoder import Decoder
from decoder.jobs.lines import Line
from decoder.jobs.on_ray import Identity, identity_of
from decoder.serve.answers import Answer
from decoder.serve.errors import ApiError
from decoder.serve.requests import parse
from decoder.serve.service import Service
from decoder.serve.settings import Settings
from decoder.serve.worker import Job, Piece

T = TypeVar("T")

Row = dict[str, Any]
"""An answer: a line of the file that OpenAI's batches give."""


class Broken(Exception):
    """An answer could not be made, for a reason that is not in its request."""


class _Asked:
    """A request in work.

    Attributes:
        ended: the pieces of its choices, or the error that it has ended with; None before.
    """

    def __init__(self, service: Service, line: Line):
        """Raises ApiError if it is refused."""
        self.line = line
        self.ended: list[list[Piece]] | ApiError | None = None
        body = dict(line.body)
        if body.get("seed") is None:
            # A server would draw one; here the same file gets the same answers.
            body["seed"] = int(hashlib.sha256(line.custom_id.encode()).hexdigest()[:8], 16)
        asked = parse(body, line.chat)
        prepared = _at_once(service.prepare(asked))
        self.answer = Answer(asked, service, prepared)
        self._pieces: dict[int, Piece] = {}
        self.job = Job(prepared.arguments, self._deliver, in_pieces=False)
        service.worker.submit(self.job)

    def _deliver(self, piece: Piece | ApiError) -> None:
        if isinstance(piece, ApiError):
            self.ended = piece
            return
        self._pieces[piece.choice] = piece
        if len(self._pieces) == len(self.job.arguments):
            self.ended = [[self._pieces[choice]] for choice in range(len(self._pieces))]


def _at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing, as those of a service without threads."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise AssertionError("it waits")


class Answering:
    """Answers requests together.

    Args:
        dec: the decoder.
        name: of the model, in answers.
        max_batch: texts that are decoded together.
        settings: further ones of `Settings`.
    """

    def __init__(self, dec: Decoder, name: str, max_batch: int, **settings: Any):
        positions = dec.model.config.max_position_embeddings
        most = Settings(name, max_batch, 2**30, positions, timeout=0.0, grace=0.0, **settings)
        self.service = Service(dec, most, own_threads=False)
        self._together = max_batch
        self._turns = threading.Condition()
        self._turning = False  # whether a thread takes a turn of the worker's

    def identity(self) -> Identity:
        """What tells the answers of this model from those of another one, or of another version."""
        return identity_of(self.service.dec)

    def answer(self, lines: Iterable[Line], created: int, done: Callable[[Line, Row], None]) -> None:
        """Answer all ``lines``, which are read as they are needed; ``done`` is called with each one's row.

        What several threads ask for is decoded together: one of them takes a turn, and the others wait for its end. All
        else each does for its own requests, one thread at a time.

        Raises:
            Broken: the decoder has failed.
            Exception: as ``done`` raises.
        """
        lines, worker = iter(lines), self.service.worker
        running: list[_Asked] = []
        line = next(lines, None)
        try:
            while line is not None or running:
                with self._turns:
                    while line is not None and worker.waiting + worker.running < self._together:
                        try:
                            running.append(_Asked(self.service, line))
                        except ApiError as refused:
                            done(line, _row(line, refused, created))
                        line = next(lines, None)
                self._turn()
                with self._turns:
                    for one in running:
                        if one.ended is not None:
                            whole = one.ended if isinstance(one.ended, ApiError) else one.answer.whole(one.ended)
                            done(one.line, _row(one.line, whole, created))
                running = [one for one in running if one.ended is None]
        finally:
            for one in running:
                worker.cancel(one.job)

    def _turn(self) -> None:
        """Take a turn of the worker's if it has work, or wait for the end of another thread's."""
        worker = self.service.worker
        with self._turns:
            if self._turning:
                self._turns.wait()
                return
            if not worker.waiting + worker.running:
                return
            self._turning = True
        try:
            worker.turn()
        finally:
            with self._turns:
                self._turning = False
                self._turns.notify_all()


def _row(line: Line, answer: dict[str, Any] | ApiError, created: int) -> Row:
    """The row of an answer, or of what a request has been refused with; raises Broken where it is not its fault."""
    key = hashlib.sha256(line.custom_id.encode()).hexdigest()[:32]
    error = None
    if isinstance(answer, ApiError):
        if answer.status >= 500:
            raise Broken(str(answer.body["error"]["message"])) from answer
        status, body = answer.status, answer.body
        error = {"code": body["error"].get("code") or "invalid_request", "message": body["error"]["message"]}
    else:
        status, body = 200, settled(answer, key, created)
    response = {"status_code": status, "request_id": f"req_{key}", "body": body}
    return {"id": f"batch_req_{key}", "custom_id": line.custom_id, "response": response, "error": error}


def settled(body: Mapping[str, Any], key: str, created: int) -> dict[str, Any]:
    """An answer's body without what differs between two runs of a request: times, names, threads, counts of drafts."""
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    usage = {name: body["usage"][name] for name in counts}
    prefix = str(body["id"]).partition("-")[0]
    for choice in body["choices"]:
        for number, call in enumerate((choice.get("message") or {}).get("tool_calls") or ()):
            call["id"] = f"call_{key[:20]}{choice['index']}{number}"
    kept = {name: value for name, value in body.items() if name != "system_fingerprint"}
    return {**kept, "id": f"{prefix}-{key}", "created": created, "usage": usage}
