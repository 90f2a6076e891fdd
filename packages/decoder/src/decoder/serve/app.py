"""The routes of OpenAI's protocol over a `Service`."""

import asyncio
import hmac
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from decoder.serve.answers import Answer
from decoder.serve.errors import ApiError
from decoder.serve.kept import Kept
from decoder.serve.metrics import Metrics
from decoder.serve.openapi import openapi
from decoder.serve.requests import Asked, Parse, parse, parse_response
from decoder.serve.response_answers import ResponseAnswer
from decoder.serve.service import Prepared, Running, Service, TimeLimit
from decoder.serve.worker import Piece

logger = logging.getLogger(__name__)
_BODY_SECONDS = 60.0  # that a client has to send its body
_MOST_DISCARDED = 2**30  # bytes of a body that is too large, read so that the client comes to read the answer
_PAGE = Path(__file__).with_name("page.html")
# What is within the page and on this server, and nothing else.
_PAGE_MAY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_GONE = 499  # the status that is counted where the client has left

Handler = Callable[[Request], Awaitable[Response]]


def make_app(service: Service) -> Starlette:
    """The ASGI application, whose requests ``service.counts`` counts as `Metrics`."""
    assert isinstance(service.counts, Metrics)
    routes = Routes(service, service.counts)
    served = [
        ("/v1/completions", "POST", routes.completions),
        ("/v1/chat/completions", "POST", routes.chat),
        ("/v1/responses", "POST", routes.respond),
        ("/v1/responses/{id}", "GET", routes.response),
        ("/v1/responses/{id}", "DELETE", routes.forget_response),
        ("/v1/responses/{id}/input_items", "GET", routes.input_items),
        ("/v1/models", "GET", routes.models),
        ("/v1/models/{model:path}", "GET", routes.model),
        ("/tokenize", "POST", routes.tokenize),
        ("/detokenize", "POST", routes.detokenize),
        ("/props", "GET", routes.props),
        ("/version", "GET", routes.version),
        ("/openapi.json", "GET", routes.openapi),
    ]
    return Starlette(
        routes=[
            *(Route(path, routes.endpoint(path, handler), methods=[method]) for path, method, handler in served),
            Route("/", routes.page, methods=["GET"]),
            Route("/health", routes.health, methods=["GET"]),
            Route("/metrics", routes.metrics, methods=["GET"]),
        ],
        middleware=_cors(service.settings.allow_origins),
        exception_handlers={HTTPException: _no_route},
    )


def _cors(origins: tuple[str, ...]) -> list[Middleware]:
    """What tells browsers which pages may use the server; not with a browser's credentials: a page sends the key."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            # A page of the internet asks for this before it may reach an address of this network.
            allow_private_network=True,
            expose_headers=["Retry-After"],
        )
    ]


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # With status 405, the methods that the path takes.
    headers = {"Allow": ", ".join(sorted(error.headers["Allow"].split(", ")))} if error.headers else {}
    words = f"this path takes {headers['Allow']}" if headers else "there is no such path"
    words += ": see /v1/completions, /v1/chat/completions, /v1/responses and /v1/models"
    response = _response(ApiError(error.status_code, words))
    response.headers.update(headers)
    return response


def _response(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


class Routes:
    """What the paths do."""

    def __init__(self, service: Service, counts: Metrics):
        self.service, self.counts, self.kept = service, counts, Kept()

    def endpoint(self, path: str, handler: Handler) -> Handler:
        """A handler for which the key is checked, whose errors are answers, and whose answers are counted."""

        async def handle(request: Request) -> Response:
            try:
                self._check_origin(request)
                self._check_key(request)
                response = await handler(request)
            except ApiError as error:
                response = _response(error)
            except ClientDisconnect:
                response = Response(status_code=_GONE)
            except Exception as error:
                # Not the message, which may hold text of the request.
                where = "".join(traceback.format_tb(error.__traceback__))
                logger.error("a request failed with %s at\n%s", type(error).__name__, where)
                response = _response(ApiError(500, "the server has a fault: see its log"))
            self.counts.requests.labels(path, response.status_code).inc()
            return response

        return handle

    def _check_origin(self, request: Request) -> None:
        """Refuse what a page of another origin sends, which some browsers' requests do without asking before."""
        origin, let = request.headers.get("origin"), self.service.settings.allow_origins
        if origin is None or "*" in let or origin in let:
            return
        # Not its scheme, which a proxy in front may change.
        if origin.partition("://")[2] != request.headers.get("host"):
            words = "pages of this origin may not use the server: start it with --allow-origin to let them"
            raise ApiError(403, words, code="origin_not_allowed")

    def _check_key(self, request: Request) -> None:
        expected = self.service.settings.api_key
        if expected is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # In constant time, so that how long the answer takes tells nothing of the key.
        if not hmac.compare_digest(given.strip().encode(), expected.encode()) or scheme.lower() != "bearer":
            words = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, words, code="invalid_api_key")

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, partial(parse, chat=False), Answer)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, partial(parse, chat=True), Answer)

    async def respond(self, request: Request) -> Response:
        reading, answering = partial(parse_response, kept=self.kept), partial(ResponseAnswer, kept=self.kept)
        return await self._generate(request, reading, answering)

    async def response(self, request: Request) -> Response:
        return JSONResponse(self.kept.get(request.path_params["id"])[0])

    async def forget_response(self, request: Request) -> Response:
        name = request.path_params["id"]
        self.kept.remove(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        items = self.kept.get(request.path_params["id"])[1]
        ids = [item.get("id") for item in items] or [None]
        order = items if request.query_params.get("order") == "asc" else items[::-1]
        return JSONResponse(
            {"object": "list", "data": order, "first_id": ids[-1], "last_id": ids[0], "has_more": False}
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["model"] != self.service.settings.model:
            words = f"there is no such model: this server has {self.service.settings.model}"
            raise ApiError(404, words, "model", "model_not_found")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        positions = self.service.dec.model.config.max_position_embeddings
        name = self.service.settings.model
        return {"id": name, "object": "model", "created": 0, "owned_by": "local", "max_model_len": positions}

    async def tokenize(self, request: Request) -> Response:
        data = await _body(request, self.service.max_body_bytes)
        return JSONResponse(await _unless_gone(request, self.service.tokenize(data)))

    async def detokenize(self, request: Request) -> Response:
        data = await _body(request, self.service.max_body_bytes)
        return JSONResponse(await _unless_gone(request, self.service.detokenize(data)))

    async def props(self, request: Request) -> Response:
        return JSONResponse(self.service.properties)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": version("tokenswift-decoder")})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi(version("tokenswift-decoder")))

    async def page(self, request: Request) -> Response:
        return HTMLResponse(_PAGE.read_bytes(), headers={"Content-Security-Policy": _PAGE_MAY})

    async def health(self, request: Request) -> Response:
        alive = self.service.worker.alive
        return JSONResponse({"status": "ok" if alive else "stopping"}, 200 if alive else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self.counts.text(), media_type=CONTENT_TYPE_LATEST)

    async def _generate(
        self, request: Request, parse: Parse, answering: Callable[[Asked, Service, Prepared], Answer]
    ) -> Response:
        metrics, clock = self.counts, asyncio.get_running_loop().time
        began = clock()
        data = await _body(request, self.service.max_body_bytes)
        limit = TimeLimit(self.service.settings.timeout)
        async with limit.kept():
            asked = await _unless_gone(request, self.service.read(data, parse))
            running = await _unless_gone(request, self.service.submit(asked, limit))
        with ExitStack() as ending:
            ending.callback(lambda: metrics.seconds.observe(clock() - began))
            ending.callback(running.close)
            answer = answering(asked, self.service, running.prepared)
            # What goes wrong before the first piece still has a status of its own.
            first = await _unless_gone(request, running.piece())
            metrics.first.observe(clock() - began)
            if asked.stream:
                return EventStream(_events(answer, first, running), ending.pop_all())
            return JSONResponse(answer.whole(await _unless_gone(request, _gathered(first, running))))


class EventStream(StreamingResponse):
    """A stream of server-sent events, with what is to be done when it has ended or the client has left it."""

    def __init__(self, events: AsyncIterator[bytes], ending: ExitStack):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in the iterator, which is never begun when the client leaves at once.
        with self._ending:
            await super().__call__(scope, receive, send)


async def _body(request: Request, limit: int) -> bytes:
    """The body of a request; one that is too large is read to its end, but not kept."""
    size, parts = 0, []
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    parts.append(part)
                elif size > _MOST_DISCARDED:
                    break
    except TimeoutError:
        words = f"the body did not arrive within {_BODY_SECONDS:g} seconds: send it faster"
        raise ApiError(408, words) from None
    if size > limit:
        raise ApiError(413, f"the body may have at most {limit:,} bytes: send less", code="body_too_large")
    return b"".join(parts)


async def _unless_gone(request: Request, result: Awaitable[Any]) -> Any:
    """The result, unless the client leaves before it is there; then ClientDisconnect is raised."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    wanted, left = asyncio.ensure_future(result), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((wanted, left), return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise ClientDisconnect
        return wanted.result()
    finally:
        for task in (wanted, left):
            task.cancel()
            with suppress(asyncio.CancelledError, ApiError):
                await task


async def _gathered(first: Piece, running: Running) -> list[list[Piece]]:
    """All pieces of each choice, of which the ``first`` of all has been read."""
    pieces: list[list[Piece]] = [[] for _ in running.prepared.arguments]
    pieces[first.choice].append(first)
    async for piece in running:
        pieces[piece.choice].append(piece)
    return pieces


async def _events(answer: Answer, first: Piece, running: Running) -> AsyncIterator[bytes]:
    """The events of a stream."""
    try:
        piece: Piece | None = first
        while piece is not None:
            for chunk in answer.chunks(piece):
                yield chunk
            piece = await running.piece()
        for chunk in answer.ending():
            yield chunk
    except ApiError as error:
        yield answer.failed(error)
