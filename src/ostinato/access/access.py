"""Access: all that a server asks about who asks."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from types import TracebackType
from typing import Self

from ostinato.access.api_keys import PREFIX, ApiKeys, public_id
from ostinato.access.audit import Audit
from ostinato.access.errors import ForbiddenError, UnauthenticatedError
from ostinato.access.grants import manages
from ostinato.access.groups import Groups
from ostinato.access.principal import LOCAL, Principal
from ostinato.access.resources import ResourceInfo, Resources
from ostinato.access.secrets import StoredSecrets
from ostinato.access.state import State
from ostinato.access.tokens import Issuers, Tokens


class Access:
    """The state, and what is kept in it. One for a server; safe from any thread.

    Args:
        path: the state's file; None: the user's own (`$OSTINATO_ACCESS`); ":memory:" for none.
        clock: seconds since 1970.
    """

    def __init__(self, path: Path | str | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self.state = State(path, clock=clock)
        self.audit = Audit(self.state)
        self.groups = Groups(self.state, self.audit)
        self.keys = ApiKeys(self.state, self.audit, self.groups)
        self.issuers = Issuers(self.state, self.audit)
        self.resources = Resources(self.state, self.audit)
        self.secrets = StoredSecrets(self.state)
        self._tokens = Tokens(self.issuers, self.groups)
        self._required = False

    @property
    def required(self) -> bool:
        """Whether a principal must authenticate: once a key was made or an issuer trusted, for good.

        Revoking the last key opens nothing: the file must be moved away for that.
        """
        if not self._required:
            self._required = self.keys.ever_made() or self.issuers.ever_added()
        return self._required

    def authenticate(self, authorization: str | None) -> Principal:
        """`identify`, once an issuer's keys are there that it takes: not for an event loop, as it waits seconds."""
        pending = self.pending(authorization)
        if pending is not None:
            wait((pending,))
        return self.identify(authorization)

    def pending(self, authorization: str | None) -> Future[None] | None:
        """What is being fetched, from now on, that `identify` takes for this header; None if nothing is.

        It ends within `jwks.TIMEOUT`, whatever comes of it. Nothing that the header says is believed for it but the
        issuer's name, if it is that of one who is trusted.
        """
        token = (authorization or "").strip().partition(" ")[2].strip()
        if not self.required or not _is_signed(token):
            return None
        return self._tokens.pending(token)

    def identify(self, authorization: str | None) -> Principal:
        """Who sends this `Authorization` header; `LOCAL`, whatever it holds, while nobody must authenticate.

        Waits for no one: an issuer's keys are those that are there.
        """
        if not self.required:
            return LOCAL
        if not authorization:
            raise UnauthenticatedError(
                "This server asks who you are. Send the header Authorization: Bearer KEY, with a key of "
                "`ostinato keys create` or a token of your organisation.",
                code="missing_credentials",
            )
        scheme, _, token = authorization.strip().partition(" ")
        token = token.strip()
        try:
            if scheme.lower() != "bearer" or not token.isascii():
                raise UnauthenticatedError("The Authorization header is not of the form: Bearer KEY.")
            if _is_signed(token):
                return self._tokens.authenticate(token)
            principal = self.keys.authenticate(token)
            if principal is None:
                raise UnauthenticatedError("The API key is unknown, revoked or expired.")
            return principal
        except UnauthenticatedError as error:
            self.audit.refused(
                None, "credential", public_id(token), {"code": error.code, "reason": str(error)}
            )
            raise

    def check_forget(self, by: Principal, *, org: str, user: str) -> None:
        """Refuse to forget what is others', but to those who manage the organisation."""
        if (by.org, by.user) != (org, user) and not manages(by, org):
            self.audit.refused(by, "escalation", "forget", {"org": org, "user": user})
            raise ForbiddenError("Forgetting what is not your own needs the permission admin:org.")

    def forget_resources(
        self, by: Principal, *, org: str, user: str = "", session: str = ""
    ) -> list[ResourceInfo]:
        """Remove the documents and schemas of an organisation, of a user, or of a user's session, and return them.

        Anyone may forget what is its own; what is others' in its organisation with `admin:org`. The KV and the secrets
        are the cache's to forget, by the scopes of what is returned.
        """
        self.check_forget(by, org=org, user=user)
        with self.state.transaction():
            gone = self.resources.forget(org=org, user=user, session=session)
            detail = {"user": user, "session": session, "resources": [info.id for info in gone]}
            self.audit.record(by, "forget", user or org, org=org, detail=detail)
        return gone

    def close(self) -> None:
        """Write what is still to be written, and close the state."""
        try:
            self.audit.flush()
        finally:
            self.state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _is_signed(token: str) -> bool:
    """Whether a credential is of the shape of an issuer's token, rather than a key's."""
    return token.isascii() and not token.startswith(PREFIX) and token.count(".") == 2
