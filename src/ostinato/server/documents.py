"""Registered documents over HTTP: the routes under `/v1/documents`."""

from __future__ import annotations

import secrets
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from ostinato.access.access import Access
from ostinato.access.grants import MAX_READERS
from ostinato.access.scope import session_name
from ostinato.engine.engine import Engine
from ostinato.prompt.cache_control import seconds
from ostinato.server.authenticate import principal_of
from ostinato.server.bodies import BodyRoute
from ostinato.server.lookup import Lookup, Readers, about
from ostinato.server.messages import Text
from ostinato.server.workers import Workers

Json = dict[str, Any]


class NewDocument(BaseModel):
    """The body of `POST /v1/documents`."""

    model_config = ConfigDict(strict=True, extra="forbid")
    text: Text = Field(min_length=1)
    name: Text | None = None
    """Without one it has a name that says nothing."""
    scope: Literal["public", "org", "user", "session"] = "user"
    readers: list[Text] = Field([], fail_fast=True, max_length=MAX_READERS)
    session: Text = ""
    """The client's name of the session, for scope session."""
    ttl: Text | int | float | None = None


def document_routes(engine: Engine, access: Access, workers: Workers, lookup: Lookup) -> APIRouter:
    """The routes under `/v1/documents`. What a principal may not use is not there for it: 404."""
    router = APIRouter(prefix="/v1/documents", route_class=BodyRoute)
    resources = access.resources

    @router.post("", status_code=201)
    async def register(request: Request, body: NewDocument) -> JSONResponse:
        """Register a document: prompts use it by its id, and it is computed once for all who may."""
        ttl = None if body.ttl is None else seconds(body.ttl, "ttl")
        principal = principal_of(request)
        made = await workers.run(
            principal,
            resources.add,
            principal,
            "document",
            body.name or f"document-{secrets.token_hex(8)}",
            body.text,
            body.scope,
            readers=body.readers,
            session=session_name(body.session),
            ttl=ttl,
        )
        return JSONResponse({"object": "document"} | about(made), 201)

    @router.get("")
    async def every(request: Request) -> Json:
        """The documents that the caller may use, without their texts."""
        principal = principal_of(request)
        found = await workers.run(principal, resources.visible, principal, "document")
        return {"object": "list", "data": [{"object": "document"} | about(info) for info in found]}

    @router.get("/{id}")
    async def one(request: Request, id: str) -> Json:
        """A document with its text."""
        principal = principal_of(request)
        found = await workers.run(principal, resources.get, principal, id, "document")
        return {"object": "document"} | about(found) | {"text": found.content}

    @router.put("/{id}/readers")
    async def set_readers(request: Request, id: str, body: Readers) -> Json:
        """Say anew who may use a document: whoever is not named any more is refused from now on."""
        principal = principal_of(request)
        info = await workers.run(principal, resources.set_readers, principal, id, "document", body.readers)
        return {"object": "document"} | about(info)

    @router.delete("/{id}")
    async def remove(request: Request, id: str) -> Json:
        """Remove a document, and everything that was computed from it."""
        principal = principal_of(request)

        def removed() -> Json:
            # In one piece, whether or not the client waits for it: nothing of what is gone stays cached.
            info = resources.remove(principal, id, "document")
            lookup.forget([info.id])
            gone = engine.forget(lambda scope: scope.resource == info.id, principal=principal)
            return {"object": "document.deleted", "id": info.id, "deleted": True, "blocks": gone.blocks}

        return await workers.run(principal, removed)

    return router
