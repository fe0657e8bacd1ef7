"""Bodies of requests: read whole, parsed and checked where that holds nobody up."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, cast

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from ostinato.errors import InvalidRequestError
from ostinato.server.authenticate import principal_of
from ostinato.server.clients import ClientGone, unless_gone
from ostinato.server.workers import Workers

Json = dict[str, Any]

AT_ONCE = 64 * 2**10
"""Most bytes of a body that is parsed on the event loop, in less time than a thread takes to begin."""

NESTED = 128
"""Deepest that lists and objects may lie in one another: what reads them further on calls itself for each."""


class BodyRoute(APIRoute):
    """A route whose work ends when its client leaves, and whose long bodies are parsed on a thread.

    FastAPI would parse and check them on the event loop, where a megabyte of JSON holds up everybody.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        sends = not {"POST", "PUT"}.isdisjoint(self.methods or ())
        field = self.body_field
        model = None if field is None else cast("type[BaseModel]", field.field_info.annotation)

        async def handle(request: Request) -> Response:
            if sends:
                try:
                    data = await request.body()
                except ClientDisconnect:
                    raise ClientGone from None
                if model is not None and data and _is_json(request):
                    request = _Read(request, await _off_loop(request, data, model))
            return await unless_gone(request.receive, handler(request))

        return handle


class _Read(Request):
    """A request whose body has been read and checked: FastAPI finds it done."""

    def __init__(self, request: Request, value: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        return b"{}"  # FastAPI only asks whether there is one

    async def json(self) -> BaseModel:
        return self._value


async def _off_loop(request: Request, data: bytes, model: type[BaseModel]) -> BaseModel:
    if len(data) <= AT_ONCE:
        return parsed(data, model)
    workers: Workers = request.app.state.workers
    return await unless_gone(request.receive, workers.run(principal_of(request), parsed, data, model))


def parsed(data: bytes, model: type[BaseModel]) -> BaseModel:
    """What a body holds.

    Raises:
        InvalidRequestError: it is not JSON.
        RequestValidationError: it is not what the model says.
    """
    value = parsed_json(data)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError(
            [each | {"loc": ("body", *each["loc"])} for each in found], body=value
        ) from None


def parsed_json(data: bytes) -> object:
    """The JSON in a body; InvalidRequestError if it is none, or nested too deep."""
    try:
        value: object = json.loads(data)
        deep = _nested_deeper(value, NESTED)
    except json.JSONDecodeError as error:
        reason = str(error)
    except UnicodeDecodeError:
        reason = "it is not in UTF-8"
    except RecursionError:
        reason = "it is nested too deep"
    except ValueError:
        reason = "it has a number of too many digits"
    else:
        if not deep:
            return value
        reason = f"it is nested too deep: {NESTED} levels are the limit"
    raise InvalidRequestError(f"The body is not valid JSON: {reason}.", code="invalid_json")


def _nested_deeper(value: object, limit: int) -> bool:
    level = [value]
    while level and limit:
        level = [inner for each in level for inner in _lists_and_objects(each)]
        limit -= 1
    return bool(level)


def _lists_and_objects(value: object) -> list[object]:
    """Those directly in a value."""
    inside: list[object] = []
    if isinstance(value, dict):
        inside = list(cast("Json", value).values())
    elif isinstance(value, list):
        inside = cast("list[object]", value)
    return [each for each in inside if isinstance(each, dict | list)]


def _is_json(request: Request) -> bool:
    """Whether FastAPI takes a body for JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    main, _, sub = kind.partition("/")
    return main == "application" and (sub == "json" or sub.endswith("+json"))
