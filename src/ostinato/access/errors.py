"""What access refuses. Each error knows the HTTP status it means, though nothing here knows HTTP."""

from __future__ import annotations

from typing import ClassVar

from ostinato.errors import OstinatoError


class AccessError(OstinatoError):
    """Base of the refusals. `code` is a stable word for programs, as OpenAI's errors have it."""

    status: ClassVar[int]

    def __init__(self, message: str, *, param: str | None = None, code: str) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnauthenticatedError(AccessError):
    """Nobody the server knows asks: no credentials, or none that hold."""

    status = 401

    def __init__(self, message: str, *, code: str = "invalid_api_key") -> None:
        super().__init__(message, code=code)


class ForbiddenError(AccessError):
    """The principal is known and asks for more than it may."""

    status = 403

    def __init__(self, message: str, *, param: str | None = None, code: str = "permission_denied") -> None:
        super().__init__(message, param=param, code=code)


class NotFoundError(AccessError):
    """Not there, or not for this principal to see: one answer for both, so that asking tells nothing."""

    status = 404

    def __init__(self, message: str, *, param: str | None = None, code: str = "not_found") -> None:
        super().__init__(message, param=param, code=code)


class ConflictError(AccessError):
    """What is asked for contradicts what the principal has already."""

    status = 409

    def __init__(self, message: str, *, param: str | None = None, code: str = "conflict") -> None:
        super().__init__(message, param=param, code=code)


class StateError(OstinatoError):
    """The file that holds the state cannot be used."""
