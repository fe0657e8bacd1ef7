"""Permissions by their names, as people give them and as the state keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import cast

from ostinato.access.names import shown
from ostinato.access.principal import PERMISSIONS, Permission
from ostinato.errors import InvalidRequestError


def parse_permissions(names: Iterable[str]) -> frozenset[Permission]:
    """Permissions by their names."""
    chosen = frozenset(names)
    unknown = sorted(chosen.difference(PERMISSIONS))
    if unknown:
        raise InvalidRequestError(
            f"There is no permission {shown(unknown[0])}: choose of {', '.join(PERMISSIONS)}.",
            param="permissions",
        )
    return frozenset(permission for permission in PERMISSIONS if permission in chosen)


def stored_permissions(text: str) -> frozenset[Permission]:
    """Permissions as the file has them. A file may name some that this version does not know: nobody has those."""
    names = cast("list[str]", json.loads(text))
    return frozenset(permission for permission in PERMISSIONS if permission in names)
