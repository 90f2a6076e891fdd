"""Answers requests of a file with a decoder of this process, as a server would."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

from decoder.cli.transcript import fingerprint
from decoder.decoder import Decoder
from decoder.jobs.lines import Line
from decoder.model.short_weights import dtype_name
from decoder.serve.errors import ApiError
from decoder.serve.service import Service
from decoder.serve.settings import Settings
from decoder.serve.whole import whole_answer

Row = dict[str, Any]
"""An answer: a line of the file that OpenAI's batches give."""

_SECONDS = 1e9  # that a request may take: a file waits for all its answers


class Broken(Exception):
    """An answer could not be made, for a reason that is not in its request."""


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
        self.service = Service(
            dec, Settings(name, max_batch, 2**30, positions, timeout=_SECONDS, grace=0.0, **settings)
        )
        self._together = 2 * max_batch  # requests that are in work, so that none waits for the next to be read

    def identity(self) -> dict[str, Any]:
        """What tells the answers of this model from those of another one, or of another version."""
        dec = self.service.dec
        return {
            "model": fingerprint(dec.model),
            "dtype": dtype_name(dec.model),
            "version": version("tokenswift-decoder"),
            "batch_invariance": dec.target.backend.computed_by() if dec.bitwise else "none",
        }

    def answer(self, lines: Iterable[Line], created: int, done: Callable[[Line, Row], None]) -> None:
        """Answer all ``lines``, which are read as they are needed; ``done`` is called with each one's row.

        Raises:
            Broken: the decoder has failed.
            Exception: as ``done`` raises.
        """
        asyncio.run(self._answer(iter(lines), created, done))

    async def _answer(self, lines: Iterator[Line], created: int, done: Callable[[Line, Row], None]) -> None:
        async def in_turn() -> None:
            for line in lines:
                done(line, await self._row(line, created))

        if not self.service.worker.alive:
            self.service.worker.start()
        tasks = [asyncio.ensure_future(in_turn()) for _ in range(self._together)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _row(self, line: Line, created: int) -> Row:
        key = hashlib.sha256(line.custom_id.encode()).hexdigest()[:32]
        error = None
        try:
            status, body = 200, settled(await whole_answer(self.service, line.body, line.chat), key, created)
        except ApiError as failed:
            if failed.status >= 500:
                raise Broken(str(failed.body["error"]["message"])) from failed
            status, body = failed.status, failed.body
            error = {"code": body["error"].get("code") or "invalid_request", "message": body["error"]["message"]}
        response = {"status_code": status, "request_id": f"req_{key}", "body": body}
        return {"id": f"batch_req_{key}", "custom_id": line.custom_id, "response": response, "error": error}

    def stop(self) -> None:
        """End the decoder's thread."""
        self.service.stop()
        self.service.worker.join()


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
