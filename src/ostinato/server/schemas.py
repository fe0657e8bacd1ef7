"""Schemas over HTTP: the routes under `/v1/schemas`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.exceptions import HTTPException
from fastapi.responses import JSONResponse

from ostinato.engine.engine import Engine
from ostinato.errors import InvalidRequestError
from ostinato.prompt.layout import Layout
from ostinato.prompt.pml import parse_schema
from ostinato.prompt.report import cacheable, overview, tree
from ostinato.prompt.schema import Schema, SchemaError
from ostinato.server.errors import RefusedError
from ostinato.server.messages import check_unicode

Json = dict[str, Any]

PML_TYPES = ("application/xml", "text/xml", "text/plain")

_BODY: Json = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {"pml": {"type": "string"}, "encode": {"type": "boolean"}},
                            "required": ["pml"],
                        },
                        {
                            "type": "object",
                            "properties": {
                                "name": {"type": "string"},
                                "children": {"type": "array", "items": {}},
                                "encode": {"type": "boolean"},
                            },
                            "required": ["name"],
                        },
                    ]
                }
            },
            "text/plain": {"schema": {"type": "string", "description": "A schema in PML."}},
        },
    }
}


class Schemas:
    """The schemas of an engine, as clients read and change them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Whether a name is taken must not change between asking and registering.
        self._changing = asyncio.Lock()

    def get(self, name: str) -> Layout:
        """The layout of a schema; 404 if there is none of that name."""
        try:
            return self._engine.schemas.get(name)
        except SchemaError as error:
            raise RefusedError(404, str(error), param="name", code="schema_not_found") from None

    def all(self) -> list[Layout]:
        """Every schema, in the order of names."""
        names = self._engine.schemas.names()
        found: list[Layout] = []
        for name in names:
            try:
                found.append(self._engine.schemas.get(name))
            except SchemaError:
                continue  # removed meanwhile
        return found

    async def add(self, schema: Schema, *, encode: bool, replace: bool) -> tuple[Layout, bool]:
        """Register a schema; its layout, and whether it replaced one. Either all of this happens or nothing."""
        async with self._changing:
            known = schema.name in self._engine.schemas.names()
            if known and not replace:
                raise RefusedError(
                    409,
                    f"There is a schema '{schema.name}' already. PUT /v1/schemas/{schema.name} replaces it.",
                    param="name",
                    code="schema_exists",
                )
            try:
                return await asyncio.to_thread(self._engine.register, schema, encode=encode), known
            except SchemaError:
                raise
            except InvalidRequestError as error:
                raise InvalidRequestError(
                    f"The schema cannot be encoded: {error}", param="encode", code=error.code
                ) from error

    async def remove(self, name: str) -> None:
        """Forget a schema; 404 if there is none of that name."""
        async with self._changing:
            self.get(name)
            self._engine.unregister(name)

    def report(self, name: str) -> Json:
        """A schema with its tree, and what of it is cached now."""
        laid_out = self.get(name)
        texts, prompt = cacheable(laid_out)
        counts = self._engine.cached_tokens(prompt)
        cached = {id(text): count for text, count in zip(texts, counts, strict=True)}
        return summary(laid_out, cached)


def schema_routes(engine: Engine) -> APIRouter:
    """The routes under `/v1/schemas`."""
    router = APIRouter(prefix="/v1/schemas")
    schemas = Schemas(engine)

    @router.post("", status_code=201, openapi_extra=_BODY)
    async def create(request: Request, encode: bool | None = None) -> JSONResponse:
        """Register a new schema, in PML or JSON."""
        schema, wanted = await _submitted(request)
        laid_out, _ = await schemas.add(schema, encode=bool(encode or wanted), replace=False)
        return JSONResponse(await asyncio.to_thread(summary, laid_out), 201)

    @router.get("")
    async def every() -> Json:
        """The schemas, without their trees."""

        def listed() -> list[Json]:
            return [{"object": "schema"} | overview(each) for each in schemas.all()]

        return {"object": "list", "data": await asyncio.to_thread(listed)}

    @router.get("/{name}")
    async def one(name: str) -> JSONResponse:
        """A schema: where everything stands, and what is cached now."""
        return JSONResponse(await asyncio.to_thread(schemas.report, name))

    @router.put("/{name}", openapi_extra=_BODY)
    async def replace(request: Request, name: str, encode: bool | None = None) -> JSONResponse:
        """Register a schema, in place of the one that has its name, if any."""
        schema, wanted = await _submitted(request)
        if schema.name != name:
            raise InvalidRequestError(
                f"The body has the schema '{schema.name}', the URL says '{name}'. Make them the same.",
                param="name",
            )
        laid_out, known = await schemas.add(schema, encode=bool(encode or wanted), replace=True)
        return JSONResponse(await asyncio.to_thread(summary, laid_out), 200 if known else 201)

    @router.delete("/{name}")
    async def remove(name: str) -> Json:
        """Forget a schema. Requests that use it finish; its blocks are evicted in time."""
        await schemas.remove(name)
        return {"object": "schema.deleted", "name": name, "deleted": True}

    return router


def summary(laid_out: Layout, cached: Mapping[int, int] | None = None) -> Json:
    """A schema with its tree."""
    return {"object": "schema"} | overview(laid_out) | {"tree": tree(laid_out.root, cached)}


async def _submitted(request: Request) -> tuple[Schema, bool]:
    """The schema in a body, and whether the body asks to encode it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    data = await request.body()
    if kind == "application/json":
        return await asyncio.to_thread(_from_json, data)
    if kind and kind not in PML_TYPES:
        raise HTTPException(
            415, "Send a schema as PML with Content-Type: application/xml, or as application/json."
        )
    # Without a folder: what a client sends must not read the server's files.
    return await asyncio.to_thread(parse_schema, data), False


def _from_json(data: bytes) -> tuple[Schema, bool]:
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise InvalidRequestError(f"The body is not valid JSON: {reason}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError('The body must be a JSON object: {"pml": "…"}, or a schema\'s JSON form.')
    fields = cast("Json", value)
    check_unicode(fields)
    encode = fields.pop("encode", None)
    if not isinstance(encode, bool | None):
        raise InvalidRequestError("encode must be true or false.", param="encode", code="invalid_value")
    if "pml" not in fields:
        return Schema.from_json(fields), bool(encode)
    pml = fields.pop("pml")
    if not isinstance(pml, str):
        raise InvalidRequestError("pml must be a string.", param="pml", code="invalid_value")
    if fields:
        name = next(iter(fields))
        raise InvalidRequestError(f"'{name}' is unknown next to pml.", param=name, code="invalid_value")
    return parse_schema(pml), bool(encode)
