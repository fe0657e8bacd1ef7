"""Every error the server answers, in the shape that the clients of the route's API read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from ostinato.access.errors import AccessError
from ostinato.errors import EngineClosedError, InvalidRequestError, ModelNotFoundError, OstinatoError
from ostinato.prompt.schema import SchemaError


@dataclass(frozen=True)
class ErrorAnswer:
    """What the client is told: an HTTP status and the fields of OpenAI's error object."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _OPENAI_TYPES.get(self.status) or (
            "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """The JSON body for clients of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status) or (
            "invalid_request_error" if self.status < 500 else "api_error"
        )
        error = {"type": kind, "message": self.message}
        return {"type": "error", "error": error, "request_id": request_id}

    def response(self, scope: Mapping[str, Any]) -> Response:
        """The HTTP response to the request of an ASGI scope."""
        body = self.anthropic_body(request_id(scope)) if is_anthropic(scope["path"]) else self.body()
        # ASCII: a message may quote what the client sent, down to half a surrogate pair.
        return Response(json.dumps(body), self.status, self.headers, media_type="application/json")


_OPENAI_TYPES = {429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_CODES = {405: "method_not_allowed", 408: "request_timeout", 413: "request_too_large"}


def is_anthropic(path: str) -> bool:
    """Whether a route is of Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def request_id(scope: Mapping[str, Any]) -> str:
    """The id of a request, which `RequestIds` gave it."""
    return scope.get("state", {}).get("request_id", "")


class RefusedError(OstinatoError):
    """The server's own no, with its status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.answer = ErrorAnswer(status, message, param=param, code=code, headers=headers or {})


# All others count as internal errors: answered with 500, and logged.
EXPECTED = (AccessError, EngineClosedError, InvalidRequestError, ModelNotFoundError, RefusedError)


def describe(error: Exception) -> ErrorAnswer:
    """What to tell the client about an error. Nothing of the internals: those are for the server's log."""
    match error:
        case RequestValidationError():
            return _describe_validation(error)
        case HTTPException():
            code = _CODES.get(error.status_code)
            return ErrorAnswer(error.status_code, str(error.detail), code=code, headers=error.headers or {})
        case RefusedError():
            return error.answer
        case AccessError():
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
            return ErrorAnswer(error.status, str(error), param=error.param, code=error.code, headers=headers)
        case InvalidRequestError():
            return ErrorAnswer(400, str(error), param=error.param, code=error.code)
        case ModelNotFoundError():
            return ErrorAnswer(404, str(error), param="model", code="model_not_found")
        case EngineClosedError():
            return ErrorAnswer(503, str(error), code="engine_closed")
        case _:
            return ErrorAnswer(500, "Internal error; the server has logged it.", code="internal_error")


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error of the app by `describe`."""

    async def handle(request: Request, error: Exception) -> Response:
        answer = describe(error)
        url = f"{request.method} {request.url.path[:200]}"
        if isinstance(error, HTTPException) and error.status_code == 404:
            answer = replace(answer, message=f"Unknown request URL: {url}.", code="unknown_url")
        elif isinstance(error, HTTPException) and error.status_code == 405:
            answer = replace(answer, message=f"Method not allowed: {url}.")
        elif answer.param == "prompt" or isinstance(error, SchemaError):
            answer = replace(answer, param=getattr(request.state, "prompt_field", answer.param))
        return answer.response(request.scope)

    for kind in (RequestValidationError, HTTPException, *EXPECTED, Exception):
        app.add_exception_handler(kind, handle)


def _describe_validation(error: RequestValidationError) -> ErrorAnswer:
    """One clear sentence out of pydantic's list: about the field that the client most likely meant.

    For a union (a string, or a list of ...) pydantic reports the failure of each member; the one that
    got deepest into the input is the one whose form the client used; the right type with a wrong value
    is closer than the wrong type. Only where all is right so far are there found to be too many.
    """
    errors: Sequence[Any] = error.errors()
    if any(each["type"] == "json_invalid" for each in errors):
        reason = errors[0]["ctx"]["error"]
        return ErrorAnswer(400, f"The body is not valid JSON: {reason}.", code="invalid_json")
    if errors[0]["loc"][0] in ("query", "path"):
        name = str(errors[0]["loc"][-1])
        return ErrorAnswer(400, f"{name}: {errors[0]['msg']}.", param=name, code="invalid_value")
    if not isinstance(error.body, dict):
        return ErrorAnswer(400, "The body must be a JSON object, sent with Content-Type: application/json.")
    paths = [_field_path(each["loc"][1:], error.body, missing=each["type"] == "missing") for each in errors]
    paths = [
        (*path, "type") if each["type"].startswith("union_tag") else path
        for path, each in zip(paths, errors, strict=True)
    ]
    kinds = [each["type"] for each in errors]
    at, _ = max(
        zip(paths, kinds, strict=True),
        key=lambda each: (each[1] == "too_long", len(each[0]), not each[1].endswith("_type")),
    )
    reasons = dict.fromkeys(each["msg"] for each, path in zip(errors, paths, strict=True) if path == at)
    first, *others = reasons
    reason = " or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at).lstrip(".")
    return ErrorAnswer(400, f"{param}: {reason}.", param=param, code="invalid_value")


def _field_path(location: Sequence[str | int], body: object, *, missing: bool) -> tuple[str | int, ...]:
    """The part of pydantic's location that names fields; the rest names the members of unions it tried."""
    path: list[str | int] = []
    for number, part in enumerate(location, start=1):
        is_field = missing and number == len(location)
        if isinstance(body, dict) and not is_field and part not in body and body.get("type") == part:  # pyright: ignore[reportUnknownMemberType]
            continue  # the member of a union that the input's own type chose
        if isinstance(body, dict):
            path.append(part)
            body = body.get(part)  # pyright: ignore[reportUnknownMemberType]
        elif isinstance(body, list) and isinstance(part, int):
            path.append(part)
            body = body[part]
    return tuple(path)
