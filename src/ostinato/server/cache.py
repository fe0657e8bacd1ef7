"""The cache over HTTP: why a request hit or missed, and what is to be forgotten."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, model_validator

from ostinato.access.access import Access
from ostinato.access.principal import Principal
from ostinato.access.scope import Scope, session_name
from ostinato.engine.engine import Engine
from ostinato.engine.explain import Explanation
from ostinato.errors import InvalidRequestError
from ostinato.server.errors import RefusedError
from ostinato.server.messages import Text
from ostinato.server.middleware import principal_of

Json = dict[str, Any]


class Forget(BaseModel):
    """The body of `POST /v1/forget`: whose or what to forget, one of these."""

    model_config = ConfigDict(strict=True, extra="forbid")
    user: Text | None = None
    """All of a user: what it computed in its own scope and its sessions, its documents and schemas."""
    session: Text | None = None
    """A session of the user (the caller, if no user is named)."""
    org: Text | None = None
    """All of an organisation; together with `user`, whose user it is."""
    document: Text | None = None
    """A document or schema, by its id: itself, and what was computed from it."""
    request: Text | None = None
    """What a request of the caller's computed, and what went on from it."""

    @model_validator(mode="after")
    def _one(self) -> Forget:
        whose = any(each is not None for each in (self.user, self.session, self.org))
        count = whose + (self.document is not None) + (self.request is not None)
        if count != 1:
            raise ValueError("say one thing to forget: user, session, org, document or request")
        if self.session is not None and not self.session:
            raise ValueError("a session has a name")
        return self


def cache_routes(engine: Engine, access: Access) -> APIRouter:
    """`GET /v1/requests/{id}/cache` and `POST /v1/forget`."""
    router = APIRouter(prefix="/v1")

    @router.get("/requests/{id}/cache")
    async def explain(request: Request, id: str) -> Json:
        """What of a request's prompt was found cached, why the rest was not, and what would help."""
        principal = principal_of(request)
        found = engine.explain(id, principal)
        if found is None:
            await asyncio.to_thread(access.audit.refused, principal, "not_found", id, {"resource": "request"})
            raise RefusedError(
                404,
                f"There is no request {id[:100]!r} of yours among the latest that were answered here.",
                param="id",
                code="request_not_found",
            )
        return explanation_json(found)

    @router.post("/forget")
    async def forget(request: Request, body: Forget) -> Json:
        """Take away what is cached of a user, a session, an organisation, a document or a request, and all that was
        computed from it; replace the secrets it was keyed under; and say what was removed."""
        return await asyncio.to_thread(forgotten, engine, access, principal_of(request), body)

    return router


def forgotten(engine: Engine, access: Access, principal: Principal, body: Forget) -> Json:
    """Do what a body asks for, and tell what was removed."""
    documents: list[str] = []
    if body.request is not None:
        if engine.explain(body.request, principal) is None:
            access.audit.refused(principal, "not_found", body.request, {"resource": "request"})
            raise RefusedError(
                404,
                f"There is no request {body.request[:100]!r} of yours among the latest that were answered here. Forget "
                "its session or its user instead.",
                param="request",
                code="request_not_found",
            )
        gone = engine.forget(lambda _: False, request_id=body.request, principal=principal)
        access.audit.record(principal, "forget", body.request[:200], detail={"kind": "request"})
    elif body.document is not None:
        kind = "schema" if body.document.startswith("sch_") else "document"
        info = access.resources.remove(principal, body.document, kind)
        documents = [info.id]
        gone = engine.forget(lambda scope: scope.resource == info.id)
        access.audit.record(principal, "forget", info.id, org=info.org, detail={"kind": kind})
    else:
        org = principal.org if body.org is None else body.org
        whole = body.org is not None and body.user is None and body.session is None
        user = "" if whole else principal.user if body.user is None else body.user
        if user and body.user is None and org != principal.org:
            raise InvalidRequestError("Name the user whose session it is.", param="user")
        session = session_name(body.session or "")
        removed = access.forget_resources(principal, org=org, user=user, session=session)
        documents = [info.id for info in removed]

        def scopes(scope: Scope) -> bool:
            theirs = scope.org == org and user in ("", scope.user) and session in ("", scope.session)
            return theirs or scope.resource in documents

        gone = engine.forget(scopes)
    return {"object": "forgotten", "blocks": gone.blocks, "tokens": gone.tokens, "documents": documents}


def explanation_json(found: Explanation) -> Json:
    """An explanation as the API gives it; what does not apply to a miss is left out."""
    spans: list[Json] = []
    for span in found.spans:
        told = asdict(span)
        if span.miss is not None:
            told["miss"] = {name: value for name, value in told["miss"].items() if value not in ("", None)}
        spans.append(told)
    return {
        "object": "cache.explanation",
        "request_id": found.request_id,
        "prompt_tokens": found.prompt_tokens,
        "cached_tokens": found.cached_tokens,
        "spans": spans,
        "advice": found.advice,
    }
