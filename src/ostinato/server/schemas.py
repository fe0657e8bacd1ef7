"""Schemas over HTTP: the routes under `/v1/schemas`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.exceptions import HTTPException
from fastapi.responses import JSONResponse

from ostinato.access.access import Access
from ostinato.access.errors import NotFoundError
from ostinato.access.principal import Principal
from ostinato.access.resources import Resource, ResourceInfo
from ostinato.access.scope import Level
from ostinato.engine.engine import Engine
from ostinato.errors import InvalidRequestError
from ostinato.prompt.cache_control import seconds
from ostinato.prompt.layout import Layout
from ostinato.prompt.pml import SourceError, parse_schema
from ostinato.prompt.report import cacheable, overview, tree
from ostinato.prompt.schema import Schema, SchemaError
from ostinato.server.errors import RefusedError
from ostinato.server.lookup import Lookup, Readers, about
from ostinato.server.messages import check_unicode
from ostinato.server.middleware import principal_of

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


@dataclass(frozen=True)
class Submitted:
    """A schema as a client registers it. What is None is left as it is, or as it is by default."""

    schema: Schema
    encode: bool = False
    scope: Level | None = None
    readers: tuple[str, ...] | None = None
    ttl: float | None = None


class Schemas:
    """The schemas of a server, as principals read and change them.

    Those that the operator has registered with the engine are everybody's to use, and an administrator's to change.
    """

    def __init__(self, engine: Engine, access: Access, lookup: Lookup) -> None:
        self._engine = engine
        self._resources = access.resources
        self._lookup = lookup

    def all(self, principal: Principal) -> list[Json]:
        """Every schema that the principal may use, without its tree, in the order of names."""
        found = [
            (info.name, self._found(principal, info.id))
            for info in self._resources.visible(principal, "schema")
        ]
        for name in self._engine.schemas.names():
            with suppress(SchemaError):  # removed meanwhile
                found.append((name, (self._engine.schemas.get(name), None)))
        return [
            {"object": "schema"} | about(info) | overview(laid_out)
            for _, (laid_out, info) in sorted(found, key=lambda each: each[0])
        ]

    def report(self, principal: Principal, name: str) -> Json:
        """A schema with its tree, and what of it is cached now, for the principal."""
        laid_out, info = self._found(principal, name)
        texts, prompt = cacheable(laid_out)
        counts = self._engine.cached_tokens(prompt, principal)
        cached = {id(text): count for text, count in zip(texts, counts, strict=True)}
        return summary(laid_out, info, cached)

    def add(self, principal: Principal, submitted: Submitted) -> Json:
        """Register a new schema. Either all of this happens or nothing."""
        name = submitted.schema.name
        if self._own(principal, name) is not None:
            raise RefusedError(
                409,
                f"There is a schema '{name}' already. PUT /v1/schemas/{name} replaces it.",
                param="name",
                code="schema_exists",
            )
        return self._insert(principal, submitted)

    def put(self, principal: Principal, submitted: Submitted) -> tuple[Json, bool]:
        """Register a schema in place of the principal's own of its name, if any; whether there was one."""
        name, wanted = submitted.schema.name, submitted.scope
        own = self._own(principal, name)
        if isinstance(own, Layout):
            self._engine.unregister(name)
            return self._insert(principal, submitted), True
        if own is None:
            return self._insert(principal, submitted), False
        if (wanted or own.level) != own.level or submitted.ttl is not None:
            made = self._prepared(principal, submitted)
            with self._resources.transaction():
                self._resources.remove(principal, own.id, "schema")
                self._resources.insert(principal, made)
            self._engine.forget(lambda scope: scope.resource == own.id)
            return summary(self._lookup.laid_out(made), made), True
        old = self._resources.get(principal, own.id, "schema")
        new = replace(old, content=content_of(submitted.schema))
        laid_out = self._laid_out(principal, new, submitted)
        self._resources.set_content(principal, old.id, new.content)
        if submitted.readers is not None:
            self._resources.set_readers(principal, old.id, "schema", submitted.readers)
        # What the new version uses too survives its next use.
        self._engine.retire(self._lookup.laid_out(old))
        return summary(laid_out, new), True

    def set_readers(self, principal: Principal, name: str, readers: Sequence[str]) -> Json:
        """Say anew who may use a schema."""
        info = self._resources.set_readers(principal, name, "schema", readers)
        return {"object": "schema"} | about(info)

    def remove(self, principal: Principal, name: str) -> None:
        """Forget a schema, and all that was computed from it; 404 if there is none of that name."""
        if isinstance(self._own(principal, name), Layout):
            self._engine.unregister(name)
        else:
            self._remove(principal, name)

    def _remove(self, principal: Principal, name: str) -> None:
        info = self._resources.remove(principal, name, "schema")
        self._engine.forget(lambda scope: scope.resource == info.id)

    def _insert(self, principal: Principal, submitted: Submitted) -> Json:
        made = self._prepared(principal, submitted)
        laid_out = self._laid_out(principal, made, submitted)
        self._resources.insert(principal, made)
        return summary(laid_out, made)

    def _prepared(self, principal: Principal, submitted: Submitted) -> Resource:
        return self._resources.prepare(
            principal,
            "schema",
            submitted.schema.name,
            content_of(submitted.schema),
            submitted.scope or "user",
            readers=submitted.readers or (),
            ttl=submitted.ttl,
        )

    def _laid_out(self, principal: Principal, resource: Resource, submitted: Submitted) -> Layout:
        """The layout of a schema that can be served, its modules computed if that is asked for."""
        laid_out = self._lookup.lay_out(submitted.schema, resource)
        if submitted.encode:
            try:
                self._engine.encode_modules(laid_out, principal)
            except SchemaError:
                raise
            except InvalidRequestError as error:
                raise InvalidRequestError(
                    f"The schema cannot be encoded: {error}", param="encode", code=error.code
                ) from error
        return laid_out

    def _own(self, principal: Principal, name: str) -> ResourceInfo | Layout | None:
        """What a principal registers a schema of that name in place of."""
        own = self._resources.own(principal, name, "schema")
        if own is None and principal.may("admin") and name in self._engine.schemas.names():
            return self._engine.schemas.get(name)
        return own

    def _found(self, principal: Principal, name: str) -> tuple[Layout, ResourceInfo | None]:
        try:
            found = self._resources.get(principal, name, "schema")
        except NotFoundError:
            try:
                return self._engine.schemas.get(name), None
            except SchemaError as error:
                raise RefusedError(404, str(error), param="name", code="schema_not_found") from None
        return self._lookup.laid_out(found), found


def schema_routes(engine: Engine, access: Access, lookup: Lookup) -> APIRouter:
    """The routes under `/v1/schemas`."""
    router = APIRouter(prefix="/v1/schemas")
    schemas = Schemas(engine, access, lookup)

    @router.post("", status_code=201, openapi_extra=_BODY)
    async def create(request: Request) -> JSONResponse:
        """Register a new schema, in PML or JSON."""
        submitted = await _submitted(request, access)
        return JSONResponse(await asyncio.to_thread(schemas.add, principal_of(request), submitted), 201)

    @router.get("")
    async def every(request: Request) -> Json:
        """The schemas, without their trees."""
        return {"object": "list", "data": await asyncio.to_thread(schemas.all, principal_of(request))}

    @router.get("/{name}")
    async def one(request: Request, name: str) -> JSONResponse:
        """A schema: where everything stands, and what is cached now."""
        return JSONResponse(await asyncio.to_thread(schemas.report, principal_of(request), name))

    @router.put("/{name}", openapi_extra=_BODY)
    async def put(request: Request, name: str) -> JSONResponse:
        """Register a schema, in place of the one that has its name, if any."""
        submitted = await _submitted(request, access)
        if submitted.schema.name != name:
            raise InvalidRequestError(
                f"The body has the schema '{submitted.schema.name}', the URL says '{name}'. Make them the same.",
                param="name",
            )
        told, known = await asyncio.to_thread(schemas.put, principal_of(request), submitted)
        return JSONResponse(told, 200 if known else 201)

    @router.put("/{name}/readers")
    async def readers(request: Request, name: str, body: Readers) -> Json:
        """Say anew who may use a schema: whoever is not named any more is refused from now on."""
        return await asyncio.to_thread(schemas.set_readers, principal_of(request), name, body.readers)

    @router.delete("/{name}")
    async def remove(request: Request, name: str) -> Json:
        """Forget a schema. Requests that use it finish; its blocks are gone."""
        await asyncio.to_thread(schemas.remove, principal_of(request), name)
        return {"object": "schema.deleted", "name": name, "deleted": True}

    return router


def content_of(schema: Schema) -> str:
    """A schema as it is kept."""
    return json.dumps(schema.to_json())


def summary(
    laid_out: Layout, info: ResourceInfo | None = None, cached: Mapping[int, int] | None = None
) -> Json:
    """A schema with its tree."""
    return {"object": "schema"} | about(info) | overview(laid_out) | {"tree": tree(laid_out.root, cached)}


async def _submitted(request: Request, access: Access) -> Submitted:
    """The schema in a body, and what the body or the query says of it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    data = await request.body()
    query = request.query_params
    asked: Json = {name: query[name] for name in ("scope", "ttl") if name in query}
    if "encode" in query:
        asked["encode"] = {"true": True, "1": True, "false": False, "0": False}.get(
            query["encode"].lower(), query["encode"]
        )
    if "readers" in query:
        asked["readers"] = [each for each in query["readers"].split(",") if each]
    try:
        return await _parsed(kind, data, asked)
    except SourceError:
        audit = access.audit.refused
        await asyncio.to_thread(audit, principal_of(request), "file", "", {"resource": "schema"})
        raise


async def _parsed(kind: str, data: bytes, asked: Json) -> Submitted:
    if kind == "application/json":
        return await asyncio.to_thread(_from_json, data, asked)
    if kind and kind not in PML_TYPES:
        raise HTTPException(
            415, "Send a schema as PML with Content-Type: application/xml, or as application/json."
        )
    # Without a folder: what a client sends must not read the server's files.
    return _asked(asked, await asyncio.to_thread(parse_schema, data))


def _from_json(data: bytes, asked: Json) -> Submitted:
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise InvalidRequestError(f"The body is not valid JSON: {reason}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError('The body must be a JSON object: {"pml": "…"}, or a schema\'s JSON form.')
    fields = cast("Json", value)
    check_unicode(fields)
    own = {name: fields.pop(name) for name in ("encode", "scope", "readers", "ttl") if name in fields}
    asked = {name: value for name, value in own.items() if value is not None} | asked
    if "pml" not in fields:
        return _asked(asked, Schema.from_json(fields))
    pml = fields.pop("pml")
    if not isinstance(pml, str):
        raise InvalidRequestError("pml must be a string.", param="pml", code="invalid_value")
    if fields:
        name = next(iter(fields))
        raise InvalidRequestError(f"'{name}' is unknown next to pml.", param=name, code="invalid_value")
    return _asked(asked, parse_schema(pml))


def _asked(asked: Json, schema: Schema) -> Submitted:
    encode, scope, readers = asked.get("encode", False), asked.get("scope"), asked.get("readers")
    if not isinstance(encode, bool):
        raise InvalidRequestError("encode must be true or false.", param="encode", code="invalid_value")
    if scope is not None and scope not in ("public", "org", "user"):
        raise InvalidRequestError("scope must be public, org or user.", param="scope", code="invalid_value")
    if readers is not None and not (
        isinstance(readers, list) and all(isinstance(each, str) for each in cast("list[object]", readers))
    ):
        raise InvalidRequestError(
            "readers must be a list such as ['group:finance', 'user:bob'].",
            param="readers",
            code="invalid_value",
        )
    ttl = seconds(asked["ttl"], "ttl") if "ttl" in asked else None
    return Submitted(
        schema, encode, scope, None if readers is None else tuple(cast("list[str]", readers)), ttl
    )
