"""PML, the Prompt Markup Language: schemas and prompts as XML.

A schema::

    <schema name="travel">
      <system>You plan trips.</system>
      <module name="trip">
        The trip takes <parameter name="days" length="4" scaffold="some"/> days.
        <union scaffold="rome">
          <module name="rome" src="rome.txt"/>
          <module name="paris" src="paris.txt" cache="false"/>
        </union>
      </module>
      <scaffold name="both" modules="trip trip/rome"/>
    </schema>

and a prompt that uses it::

    <prompt schema="travel">
      <trip days="3"><paris/></trip>
      <user>What shall I see?</user>
    </prompt>

White space: indentation and the lines that only tags stand in leave no trace, a line of text keeps its
newline, the contents of turns are stripped; CDATA and the files of `src` are kept to the character. See
`markup.own_texts`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from xml.sax.saxutils import quoteattr

from ostinato.prompt import markup
from ostinato.prompt.markup import Element
from ostinato.prompt.schema import (
    ROLES,
    Child,
    Document,
    Documents,
    Import,
    Item,
    Module,
    Parameter,
    Role,
    Scaffold,
    Schema,
    SchemaError,
    SchemaPrompt,
    Text,
    Turn,
    Union,
    known,
)

MAX_SRC_BYTES = 16 * 2**20

_SCHEMA_TAGS = ("module", "union", "parameter", "scaffold", *ROLES)
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SRC_FIX = 'put it into a file and write <module src="…">'


class SourceError(SchemaError):
    """A schema that came as text asks for a file."""


def parse_schema(source: str | bytes, *, folder: Path | None = None, name: str = "") -> Schema:
    """The schema that PML text describes.

    Args:
        source: PML, as text or as UTF-8.
        folder: where the files of `src` are; without it `src` is refused.
        name: of the file, for messages.
    """
    root = markup.parse(source, name, fix=_SRC_FIX)
    if root.tag != "schema":
        raise SchemaError(f'The document is a <{root.tag}>. Write <schema name="…">.', root.where)
    root.allow("name")
    return Schema(root.attribute("name"), _children(root, folder), where=root.where)


def load_schema(path: Path) -> Schema:
    """The schema in a file; the files of its `src` are in the same folder or below it."""
    return parse_schema(_read(path, str(path), ""), folder=path.parent, name=path.name)


def parse_prompt(source: str | bytes, *, name: str = "") -> SchemaPrompt:
    """The prompt that PML text describes."""
    root = markup.parse(source, name)
    if root.tag != "prompt":
        raise SchemaError(f'The document is a <{root.tag}>. Write <prompt schema="…">.', root.where)
    arguments = dict(root.attributes)
    schema = arguments.pop("schema", None)
    if schema is None:
        root.allow("schema")
    return SchemaPrompt(schema, _items(root, top=True), tuple(arguments.items()), where=root.where)


def write_schema(schema: Schema) -> str:
    """PML that `parse_schema` reads as this schema; the text of `src` files is in it."""
    return f"<schema name={quoteattr(schema.name)}>{_written(schema.children)}</schema>\n"


def is_prompt(text: str) -> bool:
    """Whether a text is meant as a PML prompt."""
    text = re.sub(r"\A\s*<\?xml[^>]*>", "", text).lstrip()
    while text.startswith("<!--"):
        text = text.partition("-->")[2].lstrip()
    return re.match(r"<prompt[\s>/]", text) is not None


def _children(element: Element, folder: Path | None) -> tuple[Child, ...]:
    parts = markup.own_texts(element, inline=("parameter",), strip=element.tag in ROLES)
    return tuple(Text(part) if isinstance(part, str) else _child(part, folder) for part in parts)


def _child(element: Element, folder: Path | None) -> Child:
    where = element.where
    match element.tag:
        case "module":
            element.allow("name", "src", "cache", "isolated")
            return Module(
                element.attribute("name"),
                _module_children(element, folder),
                cache=element.flag("cache", True),
                isolated=element.flag("isolated", False),
                where=where,
            )
        case "union":
            element.allow("scaffold")
            # What else than modules stands in it is for the union to refuse.
            children = cast("tuple[Module, ...]", _children(element, folder))
            return Union(children, element.attributes.get("scaffold"), where=where)
        case "parameter":
            element.allow("name", "length", "scaffold")
            element.empty()
            length = element.attribute("length")
            if not re.fullmatch(r"[0-9]{1,9}", length):
                raise SchemaError(
                    f'length="{length}" is no number of tokens. Write, say, length="10".', where
                )
            return Parameter(
                element.attribute("name"), int(length), element.attributes.get("scaffold"), where=where
            )
        case "scaffold":
            element.allow("name", "modules")
            element.empty()
            return Scaffold(
                element.attribute("name"), tuple(element.attribute("modules").split()), where=where
            )
        case "system" | "user" | "assistant":
            element.allow()
            return Role(element.tag, _children(element, folder), where=where)
        case tag:
            raise SchemaError(
                f"<{tag}> is unknown in a schema. {known(tag, _SCHEMA_TAGS)} If it is text, write &lt;{tag}, "
                f"wrap the text in <![CDATA[ … ]]>, or {_SRC_FIX}.",
                where,
            )


def _module_children(element: Element, folder: Path | None) -> tuple[Child, ...]:
    children = _children(element, folder)
    src = element.attributes.get("src")
    if src is None:
        return children
    if any(isinstance(child, Text) for child in children):
        raise SchemaError(f'The module has src="{src}" and text of its own. Keep one of them.', element.where)
    return (Text(_source(src, folder, element.where)), *children)


def _source(src: str, folder: Path | None, where: str) -> str:
    """The text of a file in the schema's folder."""
    if folder is None:
        raise SourceError(
            f'src="{src}" needs a folder to be in, but the schema came as text. Register the schema from its '
            "file, or put the text into the module.",
            where,
        )
    folder = folder.resolve()
    try:
        path = (folder / src).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a cycle of links, a NUL
        raise SchemaError(f"src={src!r} cannot be followed: {error}.", where) from None
    if not src or Path(src).is_absolute() or not path.is_relative_to(folder):
        raise SchemaError(
            f'src="{src}" leads out of the folder of the schema. Copy the file into that folder and give its '
            "name there.",
            where,
        )
    data = _read(path, f'src="{src}"', where)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SchemaError(
            f'src="{src}" is not valid UTF-8: byte 0x{data[error.start]:02X} at {error.start:,}. Save it as '
            "UTF-8.",
            where,
        ) from None


def _read(path: Path, shown: str, where: str) -> bytes:
    if path.exists() and not path.is_file():
        raise SchemaError(f"{shown} is not a regular file. Give the name of a text file.", where)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SRC_BYTES + 1)
    except OSError as error:
        raise SchemaError(f"{shown} cannot be read: {error.strerror}.", where) from None
    if len(data) > MAX_SRC_BYTES:
        raise SchemaError(f"{shown} is larger than {MAX_SRC_BYTES >> 20} MiB. Split it.", where)
    return data


def _items(element: Element, *, top: bool) -> tuple[Item, ...]:
    items: list[Item] = []
    parts = markup.own_texts(element)
    for index, part in enumerate(parts):
        if not isinstance(part, str):
            items.append(_item(part, top=top))
        elif top and index == len(parts) - 1 and not _ends_verbatim(element):
            # The reply shall not begin after a newline that only the closing tag asked for.
            items += [Text(text)] if (text := part.rstrip()) else []
        else:
            items.append(Text(part))
    return tuple(items)


def _ends_verbatim(element: Element) -> bool:
    """Whether nothing but CDATA stands at the end."""
    last = next(
        (part for part in reversed(element.content) if isinstance(part, Element) or part.text.strip()), None
    )
    return isinstance(last, markup.Chars) and last.verbatim


def _item(element: Element, *, top: bool) -> Item:
    tag, where = element.tag, element.where
    if tag in ROLES:
        element.allow()
        if not top:
            raise SchemaError(f"<{tag}> stands inside an import. Move it after all imports.", where)
        return Turn(cast("Any", tag), _plain(element, "A turn holds text only"), where=where)
    if tag == "documents":
        element.allow()
        return Documents(tuple(_document(part) for part in _only_elements(element)), where=where)
    if tag == "document":
        raise SchemaError("A <document> stands in <documents>. Put <documents> around it.", where)
    return Import(tag, tuple(element.attributes.items()), _items(element, top=False), where=where)


def _document(element: Element) -> Document:
    if element.tag != "document":
        raise SchemaError(f"<{element.tag}> stands in <documents>. Write <document>.", element.where)
    element.allow("title")
    return Document(_plain(element, "A document holds text only"), element.attributes.get("title", ""))


def _only_elements(element: Element) -> list[Element]:
    parts = markup.own_texts(element)
    if any(isinstance(part, str) for part in parts):
        raise SchemaError(f"<{element.tag}> holds tags only. Move the text out of it.", element.where)
    return element.elements


def _plain(element: Element, rule: str) -> str:
    for inner in element.elements:
        raise SchemaError(
            f"{rule}, but there is <{inner.tag}>. If it is text, write &lt;{inner.tag} or wrap the text in "
            "<![CDATA[ … ]]>; import modules outside of it.",
            inner.where,
        )
    strip = element.tag in ROLES
    return "".join(part for part in markup.own_texts(element, strip=strip) if isinstance(part, str))


def _written(children: Sequence[Child]) -> str:
    written = ""
    for index, child in enumerate(children):
        neighbours = (child, children[index - 1]) if index else (child,)
        # Next to a parameter a newline would be text.
        written += "" if any(isinstance(each, Parameter) for each in neighbours) else "\n"
        written += _written_child(child)
    return written if children and isinstance(children[-1], Parameter) else written + "\n"


def _written_child(child: Child) -> str:
    match child:
        case Text():
            return _cdata(child.text)
        case Module():
            flags = ("" if child.cache else ' cache="false"') + (' isolated="true"' if child.isolated else "")
            return f"<module name={quoteattr(child.name)}{flags}>{_written(child.children)}</module>"
        case Union():
            return f"<union{_scaffold(child.scaffold)}>{_written(child.children)}</union>"
        case Parameter():
            name, length = quoteattr(child.name), child.length
            return f'<parameter name={name} length="{length}"{_scaffold(child.scaffold)}/>'
        case Scaffold():
            modules = quoteattr(" ".join(child.modules))
            return f"<scaffold name={quoteattr(child.name)} modules={modules}/>"
        case Role():
            return f"<{child.role}>{_written(child.children)}</{child.role}>"


def _scaffold(scaffold: str | None) -> str:
    return "" if scaffold is None else f" scaffold={quoteattr(_xml(scaffold), {chr(13): '&#13;'})}"


def _cdata(text: str) -> str:
    if text.startswith("\r") or text.endswith("\r"):
        raise SchemaError("PML cannot hold a text that begins or ends with U+000D. Use JSON.")
    text = _xml(text).replace("]]>", "]]]]><![CDATA[>")
    # XML reads a carriage return as a newline unless it is written as a number.
    text = re.sub("\r+", lambda found: f"]]>{'&#13;' * len(found[0])}<![CDATA[", text)
    return f"<![CDATA[{text}]]>"


def _xml(text: str) -> str:
    if bad := _NOT_XML.search(text):
        raise SchemaError(f"PML cannot hold the character U+{ord(bad[0]):04X}. Use JSON, or take it out.")
    return text
