"""Errors as OpenAI's protocol gives them: a status, and a body with message, type, parameter and code."""

from typing import Any

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a request ends in when it cannot be answered.

    Args:
        status: of HTTP: 400 and more.
        message: one sentence, which says what to do.
        param: the field of the body that is at fault.
        code: a short name that programs can look at.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


def stopping() -> ApiError:
    """What a request is told that a stopping server does not finish."""
    return ApiError(503, "the server is stopping: send the request again later", code="stopping")
