"""The description of the server's routes in OpenAPI, made from the fields that it takes."""

from typing import Any

from decoder.serve.fields import CHAT, COMPLETION, DETOKENIZE, RESPONSE, TOKENIZE, Fields, Honoured

_BODIES: dict[str, tuple[str, Fields, tuple[str, ...]]] = {
    "/v1/chat/completions": ("Answer a chat; as server-sent events where stream is true", CHAT, ("messages",)),
    "/v1/completions": ("Go on with a text; as server-sent events where stream is true", COMPLETION, ("prompt",)),
    "/v1/responses": ("Answer a conversation of items; as events where stream is true", RESPONSE, ("input",)),
    "/tokenize": ("The token ids of a text or a chat", TOKENIZE, ()),
    "/detokenize": ("The text of token ids", DETOKENIZE, ("tokens",)),
}
_READS = {
    "/v1/models": "The served model",
    "/v1/responses/{id}": "An answer that is kept; DELETE forgets it",
    "/v1/responses/{id}/input_items": "The items in front of an answer that is kept",
    "/health": "Whether requests are taken",
    "/metrics": "Counts and times for Prometheus",
    "/version": "The version of this server",
    "/props": "How the server is set up",
}


def openapi(version: str) -> dict[str, Any]:
    """The description."""
    paths: dict[str, Any] = {path: {"get": _operation(words)} for path, words in _READS.items()}
    for path, (words, fields, needed) in _BODIES.items():
        content = {"application/json": {"schema": _schema(fields, needed)}}
        paths[path] = {"post": {**_operation(words), "requestBody": {"required": True, "content": content}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "tokenswift-decoder", "version": version},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(words: str) -> dict[str, Any]:
    answers = {"200": {"description": "Done"}, "4XX": {"description": "An error object with message and param"}}
    return {"summary": words, "responses": answers}


def _schema(fields: Fields, needed: tuple[str, ...]) -> dict[str, Any]:
    properties = {
        name: {**field.kind.schema, **({} if field.default is None else {"default": field.default})}
        for name, field in fields.items()
        if isinstance(field, Honoured)
    }
    return {"type": "object", "properties": properties, "required": list(needed)}
