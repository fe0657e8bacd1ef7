"""The lookup: registered documents and schemas, as far as whoever asks may use them at that moment."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ostinato.access.access import Access
from ostinato.access.errors import NotFoundError
from ostinato.access.grants import MAX_READERS
from ostinato.access.principal import Principal
from ostinato.access.resources import Resource, ResourceInfo
from ostinato.access.scope import session_name
from ostinato.cache.owned import Owned
from ostinato.engine.engine import Engine
from ostinato.prompt.cache_control import CacheControl, shorter
from ostinato.prompt.layout import Layout
from ostinato.prompt.resolve import Resolved, ReuseMode
from ostinato.prompt.schema import Document, Documents, Item, Schema, SchemaError, SchemaPrompt, known
from ostinato.server.messages import Text

Json = dict[str, Any]

LAID_OUT = 1_000
"""Schemas whose layouts are kept. Beyond that, whoever owns most of them loses its oldest."""


class Readers(BaseModel):
    """Who may use a document or schema beside its owner."""

    model_config = ConfigDict(strict=True, extra="forbid")
    readers: list[Text] = Field(fail_fast=True, max_length=MAX_READERS)
    """Such as "group:finance" and "user:bob"."""


def about(info: ResourceInfo | None) -> Json:
    """Whose a document or schema is and who may use it; nothing of what only the server itself has."""
    if info is None:
        return {"id": None, "scope": "public", "readers": [], "ttl": None}
    return {
        "id": info.id,
        "name": info.name,
        "scope": info.level,
        "owner": info.user,
        "readers": sorted(str(reader) for reader in info.readers),
        "ttl": info.ttl,
        "created": int(info.created),
    }


class Lookup:
    """Looks documents and schemas up for a principal. Every use asks the state anew. Safe from any thread."""

    def __init__(self, engine: Engine, access: Access) -> None:
        self._engine = engine
        self._access = access
        self._layouts: Owned[tuple[str, str], tuple[str, str], Layout] = Owned(LAID_OUT)
        """By owner, and by id and content."""
        self._forgettings = 0
        self._lock = threading.Lock()

    def resolve(
        self,
        prompt: SchemaPrompt,
        principal: Principal,
        *,
        session: str = "",
        mode: ReuseMode = "modular",
        link_tokens: int,
    ) -> Resolved:
        """The chains of a prompt, over a schema and with documents that the principal may use.

        Raises:
            NotFoundError: it names a document that is not there for this principal.
            SchemaError: it names such a schema, or is wrong in itself.
        """
        items = tuple(self._with_texts(item, principal, session) for item in prompt.items)
        prompt = replace(prompt, items=items)
        over = None if prompt.schema is None else self.layout(prompt.schema, principal, session=session)
        return self._engine.schemas.resolve(prompt, mode, link_tokens, over)

    def layout(self, name: str, principal: Principal, *, session: str = "") -> Layout:
        """The layout of a schema by its id or name; SchemaError if there is none for this principal."""
        try:
            return self.find(name, principal, session=session)[0]
        except NotFoundError:
            names = dict.fromkeys(
                [*self._engine.schemas.names(), *self._access.resources.names(principal, "schema")]
            )
            raise SchemaError(f"There is no schema {name!r}. {known(name, names)}") from None

    def find(
        self, reference: str, principal: Principal, *, session: str = ""
    ) -> tuple[Layout, ResourceInfo | None]:
        """The layout of a schema by its id or name, and what is registered of it, for this principal to use.

        A name that the operator has given a schema means that one, for everybody: nobody puts another in its place.
        `NotFoundError` if there is none.
        """
        operators = self.operators(reference)
        if operators is not None:
            return operators, None
        with self._lock:
            seen = self._forgettings
        found = self._access.resources.get(principal, reference, "schema", session=session_name(session))
        owner, known = (found.org, found.user), (found.id, found.content)
        with self._lock:
            made = self._layouts.get(owner, known)
        if made is None:
            made = self.lay_out(Schema.from_json(json.loads(found.content)), found)
            with self._lock:
                if seen == self._forgettings:  # else it may be of what was forgotten since it was read
                    self._layouts.put(owner, known, made)
        return made, found

    def operators(self, name: str) -> Layout | None:
        """The operator's schema of that name, which comes with the server."""
        try:
            return self._engine.schemas.get(name)
        except SchemaError:
            return None

    def forget(self, ids: Collection[str]) -> None:
        """Keep nothing of registered schemas that have been removed, or replaced."""
        with self._lock:
            self._forgettings += 1
            for owner, (id, content), _ in list(self._layouts):
                if id in ids:
                    self._layouts.drop(owner, (id, content))

    def lay_out(self, schema: Schema, resource: Resource) -> Layout:
        """Lay a schema out that is, or is to be, a resource; SchemaError if it cannot be."""
        return replace(self._engine.schemas.lay_out(schema), scope=resource.scope, ttl=resource.ttl)

    def _with_texts(self, item: Item, principal: Principal, session: str) -> Item:
        if not isinstance(item, Documents) or not any(document.file_id for document in item.documents):
            return item
        return replace(
            item, documents=tuple(self._with_text(each, principal, session) for each in item.documents)
        )

    def _with_text(self, document: Document, principal: Principal, session: str) -> Document:
        if not document.file_id:
            return document
        found = self._access.resources.get(
            principal, document.file_id, "document", session=session_name(session)
        )
        control = CacheControl(None, shorter(document.control.ttl, found.ttl))
        return Document(found.content, document.title, control, found.scope)
