"""How a server serves."""

from dataclasses import dataclass
from pathlib import Path

from decoder.options import TokenSwiftOptions


def name_of(model: str) -> str:
    """The name of a model in answers: a folder's own; a hub id has a slash that belongs to it."""
    return Path(model).name if Path(model).exists() else model


@dataclass(frozen=True)
class Settings:
    """How a server serves.

    Args:
        model: the name of the model in requests and answers.
        max_batch: texts that are decoded together.
        max_queue: texts that may wait.
        max_tokens: new tokens of a text.
        timeout: seconds that a request may take, with the time in which it is read and in the queue.
        grace: seconds that running requests have to end once the server is told to stop.
        method: for requests that do not name one; None chooses.
        options: how to draft.
        api_key: what clients must send; None lets everybody in.
        allow_origins: of pages that browsers let use the server; "*" is any.
    """

    model: str
    max_batch: int = 16
    max_queue: int = 128
    max_tokens: int = 4096
    timeout: float = 3600.0
    grace: float = 30.0
    method: str | None = None
    options: TokenSwiftOptions | None = None
    api_key: str | None = None
    allow_origins: tuple[str, ...] = ()
