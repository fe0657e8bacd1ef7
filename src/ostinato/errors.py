"""Errors meant for people: each message says what was wrong, where, and what to do."""


class OstinatoError(Exception):
    """Base of every error Ostinato raises on purpose."""


class InvalidRequestError(OstinatoError):
    """The request cannot be served as written (HTTP 400). `param` names the field at fault."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLongError(InvalidRequestError):
    """The prompt does not fit the model's context or the KV pool."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="prompt", code="context_length_exceeded")


class ModelNotFoundError(OstinatoError):
    """No such model in the catalogue, on disk or in the server."""


class ModelFormatError(OstinatoError):
    """The model's files are missing, corrupt or of an unsupported kind."""


class EngineClosedError(OstinatoError):
    """The engine was closed, or it failed, while the request was in flight."""
