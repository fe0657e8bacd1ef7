"""Bearer tokens of OpenID Connect and other issuers of signed JWTs.

A token is believed for what its issuer's entry here allows, and no more:

* its signature is checked first, with a key of the issuer's own set and an algorithm of that key; what the token says
  about where to find keys (`jku`, `x5u`, `jwk`) is not looked at;
* it must name the issuer and the audience, and be in its time (`exp` is required; `nbf` and `iat` are checked);
* an issuer with a fixed organisation speaks for that one alone; without, for any, so its claims must be in its hands;
* it gives the permissions only that its entry lists, by default none.

Organisation and user name are who someone is, however authenticated: `alice` of a token and `alice` of an API key in the
same organisation are one principal, with the same scopes, documents and groups (a token's groups come on top of those
in the state). Where an issuer's users are others than those of the keys, give the issuer an organisation of its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jwt

from ostinato.access.audit import Audit
from ostinato.access.errors import NotFoundError, UnauthenticatedError
from ostinato.access.groups import Groups
from ostinato.access.jwks import ALGORITHMS, Jwks, JwksError, check_source, open_jwks
from ostinato.access.names import check_name, shown
from ostinato.access.permissions import parse_permissions, stored_permissions
from ostinato.access.principal import LOCAL, PERMISSIONS, Permission, Principal
from ostinato.access.state import State
from ostinato.errors import InvalidRequestError

log = logging.getLogger(__name__)

LEEWAY = 30.0
"""Seconds that clocks may differ by."""

MAX_TOKEN = 16_384

_COLUMNS = "issuer, audience, jwks, org, org_claim, user_claim, groups_claim, permissions_claim, permissions"


@dataclass(frozen=True)
class Issuer:
    """Who issues tokens, how they are checked, and what is read of them."""

    issuer: str
    """As the tokens' `iss` has it."""
    audience: str
    """What their `aud` must hold: this server."""
    jwks: str
    """The issuer's public keys: a file, or an https URL."""
    org: str | None = None
    """The organisation of all its users; None: each token names one."""
    org_claim: str = "org"
    user_claim: str = "sub"
    groups_claim: str = "groups"
    permissions_claim: str = "permissions"
    permissions: frozenset[Permission] = field(default_factory=frozenset[Permission])
    """The most that its tokens may give."""


class Issuers:
    """The issuers of a state."""

    def __init__(self, state: State, audit: Audit) -> None:
        self._state = state
        self._audit = audit

    def add(self, issuer: Issuer, *, by: Principal = LOCAL) -> Issuer:
        """Trust an issuer, in place of what was said of it before. A key set in a file must be readable."""
        for what, value in (
            ("issuer", issuer.issuer),
            ("audience", issuer.audience),
            ("org claim", issuer.org_claim),
            ("user claim", issuer.user_claim),
            ("groups claim", issuer.groups_claim),
            ("permissions claim", issuer.permissions_claim),
        ):
            check_name(value, what, what.replace(" ", "_"))
        if issuer.org is not None:
            check_name(issuer.org, "organisation", "org")
        parse_permissions(issuer.permissions)
        issuer = replace(issuer, jwks=check_source(issuer.jwks))
        with self._state.transaction() as db:
            db.execute(
                f"INSERT OR REPLACE INTO issuers ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    issuer.issuer,
                    issuer.audience,
                    issuer.jwks,
                    issuer.org,
                    issuer.org_claim,
                    issuer.user_claim,
                    issuer.groups_claim,
                    issuer.permissions_claim,
                    json.dumps(sorted(issuer.permissions)),
                ),
            )
            detail = {
                "audience": issuer.audience,
                "jwks": issuer.jwks,
                "org": issuer.org,
                "permissions": sorted(issuer.permissions),
            }
            self._audit.record(by, "issuer.add", issuer.issuer, org=issuer.org, detail=detail)
        return issuer

    def get(self, issuer: str) -> Issuer | None:
        """The entry of an issuer, as of now."""
        row = self._state.row(f"SELECT {_COLUMNS} FROM issuers WHERE issuer = ? AND removed IS NULL", issuer)
        return None if row is None else _issuer(row)

    def all(self) -> list[Issuer]:
        """All issuers."""
        rows = self._state.rows(f"SELECT {_COLUMNS} FROM issuers WHERE removed IS NULL ORDER BY issuer")
        return [_issuer(row) for row in rows]

    def remove(self, issuer: str, *, by: Principal = LOCAL) -> None:
        """Trust an issuer no more: its tokens are refused from now on."""
        with self._state.transaction() as db:
            removed = db.execute(
                "UPDATE issuers SET removed = ? WHERE issuer = ? AND removed IS NULL",
                (self._state.now(), issuer),
            )
            if not removed.rowcount:
                raise NotFoundError(
                    f"There is no issuer {shown(issuer)}. `ostinato issuers list` shows them."
                )
            self._audit.record(by, "issuer.remove", issuer)

    def ever_added(self) -> bool:
        """Whether an issuer was ever trusted, be it removed."""
        return self._state.row("SELECT 1 FROM issuers LIMIT 1") is not None


class Tokens:
    """Tells who a token is of."""

    def __init__(self, issuers: Issuers, groups: Groups) -> None:
        self._issuers = issuers
        self._groups = groups
        self._jwks: dict[str, Jwks] = {}

    def pending(self, token: str) -> Future[None] | None:
        """What is being fetched, from now on, of what is needed to tell about a token; None if all is there."""
        try:
            issuer, algorithm, key_id = self._said(token)
        except UnauthenticatedError:
            return None
        return self._source(issuer.jwks).refresh(key_id, algorithm)

    def authenticate(self, token: str) -> Principal:
        """The principal of a token, as far as can be told without waiting for its issuer's keys; see `pending`.

        `UnauthenticatedError` says why it is not believed.
        """
        issuer, algorithm, key_id = self._said(token)
        return self._principal(issuer, self._verified(issuer, token, algorithm, key_id))

    def _said(self, token: str) -> tuple[Issuer, str, str | None]:
        """Whose a token says it is, and with which algorithm and key it would be signed. None of it is true yet."""
        if len(token) > MAX_TOKEN:
            raise _refused(f"The token is longer than {MAX_TOKEN:,} characters.")
        try:
            header, claimed = self._unverified(token)
        except (jwt.PyJWTError, ValueError, TypeError, ArithmeticError, RecursionError):
            raise _refused("The token is malformed: it is not a signed JWT.") from None
        algorithm, key_id = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise _refused(
                f"The token's algorithm {shown(str(algorithm), 40)} is not accepted. It must be signed with one of "
                f"{', '.join(sorted(ALGORITHMS))}."
            )
        if "crit" in header or not (key_id is None or isinstance(key_id, str)):
            raise _refused("The token's header asks for what this server does not know.")
        issuer = self._issuers.get(claimed) if isinstance(claimed, str) and claimed.isprintable() else None
        if issuer is None:
            raise _refused("The token's issuer (iss) is not known here.")
        return issuer, algorithm, key_id

    def _unverified(self, token: str) -> tuple[dict[str, Any], object]:
        """The header, and who the token says has issued it: only to know with whose key to check it."""
        parts = jwt.decode_complete(token, options={"verify_signature": False})
        return parts["header"], parts["payload"].get("iss")

    def _verified(self, issuer: Issuer, token: str, algorithm: str, key_id: str | None) -> dict[str, Any]:
        try:
            key = self._source(issuer.jwks).known(key_id, algorithm)
        except JwksError as error:
            log.warning("Tokens of %s cannot be checked: %s", issuer.issuer, error)
            raise _refused(
                "The token cannot be checked now: its issuer's keys cannot be had. Try again later."
            ) from None
        if key is None:
            raise _refused("The token is not signed by a key that its issuer has published.")
        try:
            return jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                issuer=issuer.issuer,
                audience=issuer.audience,
                leeway=LEEWAY,
                options={"require": ["exp", "iss", "aud", issuer.user_claim]},
            )
        except jwt.ExpiredSignatureError:
            raise _refused("The token has expired. Sign in again.") from None
        except jwt.ImmatureSignatureError:
            raise _refused("The token is not valid yet. Check that the clocks agree.") from None
        except jwt.InvalidAudienceError:
            raise _refused("The token is meant for another server (aud).") from None
        except jwt.MissingRequiredClaimError as error:
            raise _refused(f"The token has no claim {shown(error.claim, 40)}.") from None
        except (jwt.PyJWTError, ValueError, TypeError, ArithmeticError, RecursionError):
            raise _refused("The token's signature or one of its claims does not hold.") from None

    def _source(self, source: str) -> Jwks:
        found = self._jwks.get(source)
        return found if found is not None else self._jwks.setdefault(source, open_jwks(source))

    def _principal(self, issuer: Issuer, claims: dict[str, Any]) -> Principal:
        try:
            org = issuer.org or check_name(claims.get(issuer.org_claim), f"claim {issuer.org_claim}")
            user = check_name(claims.get(issuer.user_claim), f"claim {issuer.user_claim}")
            listed = _strings(claims.get(issuer.groups_claim), issuer.groups_claim)
            groups = frozenset(check_name(name, f"claim {issuer.groups_claim}") for name in listed)
            # As scopes of OAuth come: one string with spaces between. Others' permissions may be among them.
            wanted = claims.get(issuer.permissions_claim)
            given = wanted.split() if isinstance(wanted, str) else _strings(wanted, issuer.permissions_claim)
        except InvalidRequestError as error:
            raise _refused(f"The token cannot be used: {error}") from None
        return Principal(
            org,
            user,
            groups=groups | self._groups.of(org, user),
            permissions=frozenset(
                each for each in PERMISSIONS if each in given and each in issuer.permissions
            ),
            credential=issuer.issuer,
        )


def _refused(message: str) -> UnauthenticatedError:
    return UnauthenticatedError(message, code="invalid_token")


def _strings(value: Any, claim: str) -> Iterable[str]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return cast("list[str]", value)
    raise InvalidRequestError(f"The claim {claim} must be a list of names.")


def _issuer(row: Any) -> Issuer:
    return Issuer(*row[:8], permissions=stored_permissions(row[8]))
