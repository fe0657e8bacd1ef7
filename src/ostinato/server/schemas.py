"""Schemas over HTTP: the routes under `/v1/schemas`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.exceptions import HTTPException
from fastapi.responses import JSONResponse

from ostinato.access.access import Access
from ostinato.access.errors import ConflictError, ForbiddenError, NotFoundError
from ostinato.access.names import shown
from ostinato.access.principal import Principal
from ostinato.access.resources import Resource, ResourceInfo
from ostinato.access.scope import Level
from ostinato.engine.engine import Engine
from ostinato.engine.request import SamplingParams
from ostinato.engine.sequence import Sequence as EngineSequence
from ostinato.errors import EngineClosedError, InvalidRequestError
from ostinato.prompt.cache_control import seconds
from ostinato.prompt.layout import Layout
from ostinato.prompt.pml import SourceError, parse_schema
from ostinato.prompt.registry import module_prompts
from ostinato.prompt.report import cacheable, overview, tree
from ostinato.prompt.resolve import resolve
from ostinato.prompt.schema import Schema, SchemaError, SchemaPrompt
from ostinato.server.authenticate import principal_of
from ostinato.server.bodies import BodyRoute
from ostinato.server.errors import RefusedError
from ostinato.server.limits import Place
from ostinato.server.lookup import Lookup, Readers, about
from ostinato.server.messages import check_unicode
from ostinato.server.middleware import place_of
from ostinato.server.workers import Workers

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


@dataclass(frozen=True)
class _Change:
    """A registration that has been checked, and is still to be made."""

    made: Resource
    laid_out: Layout
    register: Callable[[], None]
    replaces: bool = False


class Schemas:
    """The schemas of a server, as principals read and change them.

    Those that the operator has registered with the engine are everybody's to use, and an administrator's to change.
    What is not asynchronous here takes a while, and is for threads.
    """

    def __init__(self, engine: Engine, access: Access, lookup: Lookup, workers: Workers) -> None:
        self._engine = engine
        self._resources = access.resources
        self._secrets = access.secrets
        self._lookup = lookup
        self._workers = workers

    def all(self, principal: Principal) -> list[Json]:
        """Every schema that the principal may use, without its tree, in the order of names."""
        ids = [(info.name, info.id) for info in self._resources.visible(principal, "schema")]
        found: list[tuple[str, tuple[Layout, ResourceInfo | None]]] = []
        for name, reference in [*ids, *((name, name) for name in self._engine.schemas.names())]:
            with suppress(NotFoundError):  # removed meanwhile
                found.append((name, self._lookup.find(reference, principal)))
        return [
            {"object": "schema"} | about(info) | overview(laid_out)
            for _, (laid_out, info) in sorted(found, key=lambda each: each[0])
        ]

    def report(self, principal: Principal, name: str) -> Json:
        """A schema with its tree, and what of it is cached now, for the principal."""
        laid_out, info = self._lookup.find(name, principal)
        texts, prompt = cacheable(laid_out)
        counts = self._engine.cached_tokens(prompt, principal)
        cached = {id(text): count for text, count in zip(texts, counts, strict=True)}
        return summary(laid_out, info, cached)

    async def add(self, principal: Principal, submitted: Submitted, place: Place) -> Json:
        """Register a new schema. Either all of this happens or nothing, which is so too for who leaves meanwhile."""
        epoch = self._engine.epoch
        change = await self._workers.run(principal, self._addition, principal, submitted)
        return await self._make(principal, submitted, change, epoch, place)

    async def put(self, principal: Principal, submitted: Submitted, place: Place) -> tuple[Json, bool]:
        """Register a schema in place of the principal's own of its name, if any; whether there was one."""
        epoch = self._engine.epoch
        change = await self._workers.run(principal, self._replacement, principal, submitted)
        return await self._make(principal, submitted, change, epoch, place), change.replaces

    def set_readers(self, principal: Principal, name: str, readers: Sequence[str]) -> Json:
        """Say anew who may use a schema."""
        self._check_not_operators(name)
        info = self._resources.set_readers(principal, name, "schema", readers)
        return {"object": "schema"} | about(info)

    def remove(self, principal: Principal, name: str) -> None:
        """Forget a schema, and all that was computed from it; 404 if there is none of that name."""
        if principal.may("admin") and self._lookup.operators(name) is not None:
            self._engine.unregister(name)
            return
        self._check_not_operators(name)
        self._forget(principal, self._resources.remove(principal, name, "schema").id)

    def _addition(self, principal: Principal, submitted: Submitted) -> _Change:
        name = submitted.schema.name
        if self._own(principal, name) is not None:
            raise RefusedError(
                409,
                f"There is a schema '{name}' already. PUT /v1/schemas/{name} replaces it.",
                param="name",
                code="schema_exists",
            )
        return self._new(principal, submitted)

    def _new(self, principal: Principal, submitted: Submitted) -> _Change:
        made = self._prepared(principal, submitted)
        laid_out = self._lookup.lay_out(submitted.schema, made)
        return _Change(made, laid_out, lambda: self._resources.insert(principal, made))

    def _replacement(self, principal: Principal, submitted: Submitted) -> _Change:
        wanted, own = submitted.scope, self._own(principal, submitted.schema.name)
        if own is None:
            return self._new(principal, submitted)
        if isinstance(own, Layout):
            return self._in_place_of_operators(principal, submitted)
        if (wanted or own.level) != own.level or submitted.ttl is not None:
            return self._with_another_scope(principal, submitted, own.id)
        old = self._resources.get(principal, own.id, "schema")
        new = replace(old, content=content_of(submitted.schema))

        def register() -> None:
            with self._resources.transaction():
                self._resources.set_content(principal, old.id, new.content)
                if submitted.readers is not None:
                    self._resources.set_readers(principal, old.id, "schema", submitted.readers)
            self._lookup.forget([old.id])
            # What the new version uses too survives its next use.
            self._engine.retire(self._lookup.lay_out(Schema.from_json(json.loads(old.content)), old))

        return _Change(new, self._lookup.lay_out(submitted.schema, new), register, replaces=True)

    def _in_place_of_operators(self, principal: Principal, submitted: Submitted) -> _Change:
        change = self._new(principal, submitted)

        def register() -> None:
            change.register()
            with suppress(SchemaError):  # another administrator has done it
                self._engine.unregister(submitted.schema.name)

        return replace(change, register=register, replaces=True)

    def _with_another_scope(self, principal: Principal, submitted: Submitted, old: str) -> _Change:
        change = self._new(principal, submitted)

        def register() -> None:
            with self._resources.transaction():
                self._resources.remove(principal, old, "schema")
                change.register()
            self._forget(principal, old)

        return replace(change, register=register, replaces=True)

    async def _make(
        self, principal: Principal, submitted: Submitted, change: _Change, epoch: int, place: Place
    ) -> Json:
        """Compute the modules of what is to be registered, if that is asked for; then register it."""
        with self._secrets.preparing(change.made.scope):
            if submitted.encode:
                place.afford()
                try:
                    await self._encode(principal, change.laid_out, epoch, place)
                except SchemaError:
                    raise
                except InvalidRequestError as error:
                    raise InvalidRequestError(
                        f"The schema cannot be encoded: {error}", param="encode", code=error.code
                    ) from error
            await self._workers.run(principal, self._register, change)
        return summary(change.laid_out, change.made)

    def _register(self, change: _Change) -> None:
        change.register()
        self._secrets.secret(change.made.scope)  # under which its modules were computed

    async def _encode(self, principal: Principal, laid_out: Layout, epoch: int, place: Place) -> None:
        """Compute modules one after the other, waiting on no thread. Ends when the client leaves."""

        def prepared(prompt: SchemaPrompt) -> EngineSequence:
            params = SamplingParams(max_tokens=1, temperature=0)
            return self._engine.prepare(
                resolve(laid_out, prompt).prompt, params, principal=principal, epoch=epoch
            )

        for prompt in await self._workers.run(principal, module_prompts, laid_out.schema):
            request = await self._workers.run(principal, prepared, prompt)
            async with aclosing(self._engine.afollow(request)) as chunks:
                async for chunk in chunks:
                    if chunk.finish_reason == "cancelled":
                        raise EngineClosedError("The server is shutting down.")
                    usage = chunk.usage
                    if chunk.finish_reason is not None:
                        place.charge(usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens)

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

    def _forget(self, principal: Principal, id: str) -> None:
        self._lookup.forget([id])
        self._engine.forget(lambda scope: scope.resource == id, principal=principal)

    def _own(self, principal: Principal, name: str) -> ResourceInfo | Layout | None:
        """What a principal registers a schema of that name in place of."""
        operators = self._lookup.operators(name)
        if operators is None:
            return self._resources.own(principal, name, "schema")
        if principal.may("admin"):
            return operators
        raise ConflictError(
            f"The operator of this server has a schema {shown(name)}, which everybody means by that name. Choose "
            "another.",
            param="name",
            code="name_taken",
        )

    def _check_not_operators(self, name: str) -> None:
        if self._lookup.operators(name) is not None:
            raise ForbiddenError(
                f"By the name {shown(name)} everybody means the operator's schema, which is for all to use and for "
                "administrators to change. One of yours that has it is reached by its id.",
                param="name",
            )


def schema_routes(engine: Engine, access: Access, lookup: Lookup, workers: Workers) -> APIRouter:
    """The routes under `/v1/schemas`."""
    router = APIRouter(prefix="/v1/schemas", route_class=BodyRoute)
    schemas = Schemas(engine, access, lookup, workers)

    @router.post("", status_code=201, openapi_extra=_BODY)
    async def create(request: Request) -> JSONResponse:
        """Register a new schema, in PML or JSON."""
        submitted = await _submitted(request, access, workers)
        return JSONResponse(await schemas.add(principal_of(request), submitted, place_of(request)), 201)

    @router.get("")
    async def every(request: Request) -> Json:
        """The schemas, without their trees."""
        principal = principal_of(request)
        return {"object": "list", "data": await workers.run(principal, schemas.all, principal)}

    @router.get("/{name}")
    async def one(request: Request, name: str) -> JSONResponse:
        """A schema: where everything stands, and what is cached now."""
        principal = principal_of(request)
        return JSONResponse(await workers.run(principal, schemas.report, principal, name))

    @router.put("/{name}", openapi_extra=_BODY)
    async def put(request: Request, name: str) -> JSONResponse:
        """Register a schema, in place of the one that has its name, if any."""
        submitted = await _submitted(request, access, workers)
        if submitted.schema.name != name:
            raise InvalidRequestError(
                f"The body has the schema '{submitted.schema.name}', the URL says '{name}'. Make them the same.",
                param="name",
            )
        told, known = await schemas.put(principal_of(request), submitted, place_of(request))
        return JSONResponse(told, 200 if known else 201)

    @router.put("/{name}/readers")
    async def readers(request: Request, name: str, body: Readers) -> Json:
        """Say anew who may use a schema: whoever is not named any more is refused from now on."""
        principal = principal_of(request)
        return await workers.run(principal, schemas.set_readers, principal, name, body.readers)

    @router.delete("/{name}")
    async def remove(request: Request, name: str) -> Json:
        """Forget a schema. Requests that use it finish; its blocks are gone."""
        principal = principal_of(request)
        await workers.run(principal, schemas.remove, principal, name)
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


async def _submitted(request: Request, access: Access, workers: Workers) -> Submitted:
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
    principal = principal_of(request)
    try:
        return await workers.run(principal, _parsed, kind, data, asked)
    except SourceError:
        await workers.run(principal, access.audit.refused, principal, "file", "", {"resource": "schema"})
        raise


def _parsed(kind: str, data: bytes, asked: Json) -> Submitted:
    if kind == "application/json":
        return _from_json(data, asked)
    if kind and kind not in PML_TYPES:
        raise HTTPException(
            415, "Send a schema as PML with Content-Type: application/xml, or as application/json."
        )
    # Without a folder: what a client sends must not read the server's files.
    return _asked(asked, parse_schema(data))


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
