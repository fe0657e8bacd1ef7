"""Chat templates: the model's own Jinja code, run in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ostinato.errors import ModelFormatError


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which templates do not expect.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


@lru_cache(maxsize=32)
def compiled(template: str) -> jinja2.Template:
    """A chat template, ready to render."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = to_json
    functions: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ModelFormatError(
            f"The model's chat template is not valid Jinja: {error}. Use a corrected checkpoint."
        ) from error
