"""The whole answer of a request that is not streamed, without HTTP around it."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from decoder.serve.answers import Answer
from decoder.serve.requests import Asked, parse
from decoder.serve.service import Running, Service, TimeLimit
from decoder.serve.worker import Piece


async def whole_answer(service: Service, body: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    """The body of the answer to a checked JSON ``body``. Raises ApiError as the server would answer."""
    asked = parse(body, chat)
    running = await service.submit(asked, TimeLimit(service.settings.timeout), at_once=True)
    with closing(running):
        answer = Answer(asked, service, running)
        return answer.whole(await gathered(asked, None, running))


async def gathered(asked: Asked, first: Piece | None, running: Running) -> list[list[Piece]]:
    """All pieces of each choice, the ``first`` of all if it has been read."""
    pieces: list[list[Piece]] = [[] for _ in range(asked.choices)]
    if first is not None:
        pieces[first.choice].append(first)
    async for piece in running:
        pieces[piece.choice].append(piece)
    return pieces
