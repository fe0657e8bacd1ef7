"""The lookup: registered documents and schemas, as far as whoever asks may use them at that moment."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from ostinato.access.access import Access
from ostinato.access.errors import NotFoundError
from ostinato.access.principal import Principal
from ostinato.access.resources import Resource, ResourceInfo
from ostinato.access.scope import session_name
from ostinato.engine.engine import Engine
from ostinato.prompt.cache_control import CacheControl, shorter
from ostinato.prompt.layout import Layout
from ostinato.prompt.resolve import Resolved, ReuseMode
from ostinato.prompt.schema import Document, Documents, Item, Schema, SchemaError, SchemaPrompt, known
from ostinato.server.messages import Text

Json = dict[str, Any]

LAID_OUT = 1_000
"""Schemas whose layouts are kept."""


class Readers(BaseModel):
    """Who may use a document or schema beside its owner."""

    model_config = ConfigDict(strict=True, extra="forbid")
    readers: list[Text]
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
        self._layouts: OrderedDict[tuple[str, str], Layout] = OrderedDict()
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
            found = self._access.resources.get(principal, name, "schema", session=session_name(session))
        except NotFoundError:
            # What the operator has given the server along is everybody's.
            operators = self._engine.schemas.names()
            if name in operators:
                return self._engine.schemas.get(name)
            visible = [info.name for info in self._access.resources.visible(principal, "schema")]
            raise SchemaError(
                f"There is no schema {name!r}. {known(name, dict.fromkeys([*visible, *operators]))}"
            ) from None
        return self.laid_out(found)

    def laid_out(self, resource: Resource) -> Layout:
        """The layout of a registered schema, under the scope that it has of its own."""
        known = resource.id, resource.content
        with self._lock:
            if known in self._layouts:
                self._layouts.move_to_end(known)
                return self._layouts[known]
        made = self.lay_out(Schema.from_json(json.loads(resource.content)), resource)
        with self._lock:
            self._layouts[known] = made
            if len(self._layouts) > LAID_OUT:
                self._layouts.popitem(last=False)
        return made

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
