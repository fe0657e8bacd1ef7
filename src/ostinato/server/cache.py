"""The cache over HTTP: why a request hit or missed, and what is to be forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, model_validator

from ostinato.access.access import Access
from ostinato.access.principal import Principal
from ostinato.access.scope import Scope, session_name
from ostinato.engine.engine import Engine
from ostinato.engine.explain import Explanation
from ostinato.errors import InvalidRequestError
from ostinato.server.authenticate import principal_of
from ostinato.server.bodies import BodyRoute
from ostinato.server.errors import RefusedError
from ostinato.server.lookup import Lookup
from ostinato.server.messages import Text
from ostinato.server.workers import Workers

Json = dict[str, Any]


class Forget(BaseModel):
    """The body of `POST /v1/forget`: whose or what to forget, one of these."""

    model_config = ConfigDict(strict=True, extra="forbid")
    user: Text | None = None
    """All of a user: what it computed in its own scope and its sessions, its documents and schemas."""
    session: Text | None = None
    """A session of the user (the caller, if no user is named)."""
    end_user: Text | None = None
    """Of the user (the caller, if no user is named), what was asked for this one of its own users."""
    cache_salt: Text | None = None
    """What the user has computed under this salt."""
    org: Text | None = None
    """All of an organisation; together with `user`, whose user it is."""
    document: Text | None = None
    """A document or schema, by its id: itself, and what was computed from it."""
    request: Text | None = None
    """What a request of the caller's computed, and what went on from it."""

    @model_validator(mode="after")
    def _one(self) -> Forget:
        parts = (self.session, self.end_user, self.cache_salt)
        whose = any(each is not None for each in (self.user, self.org, *parts))
        count = whose + (self.document is not None) + (self.request is not None)
        if count != 1:
            raise ValueError(
                "say one thing to forget: user, session, end_user, cache_salt, org, document or request"
            )
        if any(each is not None and not each for each in parts):
            raise ValueError("a session, an end user and a salt have a name")
        return self


def cache_routes(engine: Engine, access: Access, workers: Workers, lookup: Lookup) -> APIRouter:
    """`GET /v1/requests/{id}/cache` and `POST /v1/forget`."""
    router = APIRouter(prefix="/v1", route_class=BodyRoute)

    @router.get("/requests/{id}/cache")
    async def explain(request: Request, id: str) -> Json:
        """What of a request's prompt was found cached, why the rest was not, and what would help."""
        principal = principal_of(request)
        found = engine.explain(id, principal)
        if found is None:
            detail = {"resource": "request"}
            await workers.run(principal, access.audit.refused, principal, "not_found", id, detail)
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
        computed from it; replace the secrets it was keyed under; and say how much of the caller's own that was."""
        principal = principal_of(request)
        forgetting = await workers.run(principal, forgetting_of, engine, access, principal, body)
        lookup.forget(forgetting.documents)
        # A client that leaves does not part the removal from the forgetting.
        gone = await asyncio.shield(
            engine.aforget(forgetting.scopes, request_id=body.request or "", principal=principal)
        )
        return {
            "object": "forgotten",
            "blocks": gone.blocks,
            "tokens": gone.tokens,
            "documents": list(forgetting.documents),
        }

    return router


@dataclass(frozen=True)
class Forgetting:
    """What is to be forgotten: the documents and schemas that are gone already, and the scopes whose KV is to go."""

    documents: tuple[str, ...]
    scopes: Callable[[Scope], bool]


def forgetting_of(engine: Engine, access: Access, principal: Principal, body: Forget) -> Forgetting:
    """Check that a principal may forget what a body asks for, remove what is registered of it, and say what is left."""
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
        access.audit.record(principal, "forget", body.request[:200], detail={"kind": "request"})
        return Forgetting((), lambda _: False)
    if body.document is not None:
        kind = "schema" if body.document.startswith("sch_") else "document"
        info = access.resources.remove(principal, body.document, kind)
        access.audit.record(principal, "forget", info.id, org=info.org, detail={"kind": kind})
        return Forgetting((info.id,), lambda scope: scope.resource == info.id)
    org = principal.org if body.org is None else body.org
    parts = [session_name(each or "") for each in (body.session, body.end_user, body.cache_salt)]
    whole = body.org is not None and body.user is None and not any(parts)
    user = "" if whole else principal.user if body.user is None else body.user
    if user and body.user is None and org != principal.org:
        raise InvalidRequestError("Name the user whose it is.", param="user")
    session, end_user, salt = parts
    if end_user or salt:
        access.check_forget(principal, org=org, user=user)
        removed: tuple[str, ...] = ()  # what is registered is of no end user, and under no salt
    else:
        removed = tuple(
            info.id for info in access.forget_resources(principal, org=org, user=user, session=session)
        )

    def scopes(scope: Scope) -> bool:
        whose = (org, scope.org), (user, scope.user), (session, scope.session)
        parts = (end_user, scope.end_user), (salt, scope.salt)
        # Salted text of the organisation is not one user's to forget.
        theirs = scope.org == org and all(asked in ("", has) for asked, has in (*whose, *parts))
        return theirs or scope.resource in removed

    return Forgetting(removed, scopes)


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
