"""Names of organisations, users, groups and resources: which are taken, and how any text is shown safely."""

from __future__ import annotations

from ostinato.errors import InvalidRequestError

MAX_NAME = 256


def check_name(name: object, what: str, param: str | None = None) -> str:
    """The name, if it can be one. It is kept as it is and matched exactly: lookalikes are other names.

    Control and format characters are refused because they make two names look like one, and one line of a log like
    two; spaces around a name for the first reason.
    """
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"The {what} must be a name: a non-empty string.", param=param)
    if len(name) > MAX_NAME:
        raise InvalidRequestError(
            f"The {what} is {len(name):,} characters long; {MAX_NAME} are the most.", param=param
        )
    if not name.isprintable() or name != name.strip():
        raise InvalidRequestError(
            f"The {what} {shown(name)} has characters that cannot be seen, or spaces around it. Leave them out.",
            param=param,
        )
    return name


def shown(text: str, limit: int = 100) -> str:
    """Any text for a message: quoted, on one line, and not too long."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def printable(text: str, limit: int) -> str:
    """Any text for the log: what is not printable (line ends, NUL, half surrogates) is escaped, the rest kept."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
