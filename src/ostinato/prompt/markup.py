"""XML without its dangers, and with the place of everything: what PML is read with.

Expat rather than a tree library, because it tells the line and *column* of every tag and which text is
CDATA. A document with a DOCTYPE is refused before anything in it is read, so there are no entities to
expand and nothing outside is ever opened.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.parsers import expat

from ostinato.prompt.schema import MAX_DEPTH, SchemaError, known

MAX_BYTES = 64 * 2**20

_ESCAPES = "write &lt; for < and &amp; for &, wrap the text in <![CDATA[ … ]]>"
_ENTITIES = "XML knows &lt; &gt; &amp; &quot; &apos; and numbers such as &#233;"


@dataclass
class Chars:
    """Text between tags; `verbatim` if it is CDATA."""

    text: str
    verbatim: bool


@dataclass
class Element:
    """A tag with what is in it."""

    tag: str
    attributes: dict[str, str]
    where: str
    content: list[Element | Chars] = field(default_factory=list["Element | Chars"])

    @property
    def elements(self) -> list[Element]:
        """The tags in it."""
        return [part for part in self.content if isinstance(part, Element)]

    def attribute(self, name: str) -> str:
        """An attribute that must be there."""
        if name not in self.attributes:
            raise SchemaError(f'<{self.tag}> lacks {name}. Write <{self.tag} {name}="…">.', self.where)
        return self.attributes[name]

    def flag(self, name: str, default: bool) -> bool:
        """An attribute that is "true" or "false"."""
        value = self.attributes.get(name)
        if value is None:
            return default
        if value not in ("true", "false"):
            raise SchemaError(
                f'{name}="{value}" on <{self.tag}> must be {name}="true" or {name}="false".', self.where
            )
        return value == "true"

    def allow(self, *names: str) -> None:
        """Refuse attributes other than these."""
        for name in self.attributes:
            if name not in names:
                raise SchemaError(
                    f"<{self.tag}> takes no attribute '{name}'. {known(name, names)}", self.where
                )

    def empty(self) -> None:
        """Refuse content."""
        if any(isinstance(part, Element) or part.text.strip() for part in self.content):
            raise SchemaError(f"<{self.tag}> has no content. End it with />.", self.where)


def parse(source: str | bytes, name: str = "", *, fix: str = "") -> Element:
    """The root element of a document; `SchemaError` says where it is wrong and what to write instead.

    Args:
        source: the document, as text or as UTF-8.
        name: of its file, for messages.
        fix: a further way to write text that holds < and &.
    """
    data = _utf8(source, name)
    return _Reader(
        data, name, f"{_ESCAPES}, or {fix}" if fix else _ESCAPES.replace(", wrap", ", or wrap")
    ).root


class _Reader:
    def __init__(self, data: bytes, name: str, escapes: str) -> None:
        self._data = data
        self._name = name
        self._escapes = escapes
        self._open: list[Element] = []
        self._root: Element | None = None
        self._in_cdata = False
        # Our encoding overrides the one that the document claims.
        self._parser = parser = expat.ParserCreate("utf-8")
        parser.buffer_text = True
        parser.buffer_size = 2**20
        parser.StartDoctypeDeclHandler = self._doctype
        parser.EntityDeclHandler = self._doctype
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.StartCdataSectionHandler = self._start_cdata
        parser.EndCdataSectionHandler = self._end_cdata
        parser.ProcessingInstructionHandler = self._instruction
        try:
            parser.Parse(data, True)
        except expat.ExpatError as error:
            raise self._explained(error) from None
        assert self._root is not None
        self.root = self._root

    def _where(self, line: int | None = None, column: int | None = None) -> str:
        line = self._parser.CurrentLineNumber if line is None else line
        column = self._parser.CurrentColumnNumber if column is None else column
        return place(self._name, line, column + 1)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag, attributes, self._where())
        # One for the root, which is no nesting.
        if len(self._open) > MAX_DEPTH:
            raise SchemaError(
                f"<{tag}> is nested more than {MAX_DEPTH} deep. Move inner modules further out.",
                element.where,
            )
        if self._open:
            self._open[-1].content.append(element)
        else:
            self._root = element
        self._open.append(element)

    def _end(self, _: str) -> None:
        self._open.pop()

    def _characters(self, text: str) -> None:
        content = self._open[-1].content
        last = content[-1] if content else None
        if self._in_cdata or not isinstance(last, Chars) or last.verbatim:
            content.append(Chars(text, self._in_cdata))
        else:
            last.text += text  # a comment stood between

    def _start_cdata(self) -> None:
        self._in_cdata = True

    def _end_cdata(self) -> None:
        self._in_cdata = False

    def _doctype(self, *_: object) -> None:
        raise SchemaError(
            "A DOCTYPE, and with it entity declarations, is not allowed. Remove it; write characters as they "
            f"are ({_ENTITIES}).",
            self._where(),
        )

    def _instruction(self, target: str, _: str) -> None:
        raise SchemaError(
            f"<?{target} …?> is a processing instruction, which would be lost. If it is text, {self._escapes}.",
            self._where(),
        )

    def _explained(self, error: expat.ExpatError) -> SchemaError:
        """What expat says, in terms of what was meant."""
        message, fix = expat.ErrorString(error.code), ""
        line, column = error.lineno, error.offset
        lines = self._data.decode().split("\n")
        text = lines[line - 1] if line <= len(lines) else ""
        opened = text.rfind("<", 0, column + 1)
        entity = re.match(r"&\s*[\w.\-]*;?", text[column:])
        match message:
            case "undefined entity" if entity:
                fix = f"{entity[0]} is not defined: {_ENTITIES}. For the text itself write &amp;{entity[0][1:]}."
            case "mismatched tag":
                inner, column = self._open[-1], opened
                fix = (
                    f"this closing tag does not match <{inner.tag}>, opened at {inner.where}. Close it first; if "
                    f"<{inner.tag} is text, {self._escapes}."
                )
            case "no element found" | "unclosed token" | "unclosed CDATA section" if self._open:
                inner = self._open[-1]
                fix = f"the document ends inside <{inner.tag}>, opened at {inner.where}. Close it."
            case "no element found":
                fix = "the document is empty. Write a <schema> or a <prompt>."
            case "duplicate attribute":
                fix = "the tag has the same attribute twice. Remove one of them."
            case "syntax error":
                fix = 'the document does not begin with a tag. Write <schema name="…"> or <prompt>.'
            case "junk after document element":
                fix = "something stands after the end of the document. There may be one root tag only."
            case _ if "&" in text[max(0, column - 1) : column + 1]:
                fix = f"a & stands alone. In text, {self._escapes}."
            case _ if (char := text[column : column + 1]) and ord(char) < 32 and char not in "\t\r":
                fix = f"the character U+{ord(char):04X} is not allowed in XML. Remove it."
            case _ if opened >= 0 and ">" not in text[opened:column]:
                column = opened
                fix = f"this < does not begin a proper tag. In text, {self._escapes}."
            case _:
                fix = f"this is not well-formed XML ({message}). In text, {self._escapes}."
        return SchemaError(fix[0].upper() + fix[1:], self._where(line, column))


def place(name: str, line: int, column: int) -> str:
    """How messages name a place."""
    return f"{name}, line {line}, column {column}" if name else f"line {line}, column {column}"


def _utf8(source: str | bytes, name: str) -> bytes:
    """The document as valid UTF-8 within the limit."""
    try:
        data = source.encode() if isinstance(source, str) else source
        if len(data) <= MAX_BYTES:
            data.decode()
    except UnicodeEncodeError as error:
        raise SchemaError("The text holds half of a surrogate pair. Send valid Unicode.", name) from error
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        line = before.count(b"\n") + 1
        column = len(before[before.rfind(b"\n") + 1 :].decode(errors="replace")) + 1
        raise SchemaError(
            f"The byte 0x{error.object[error.start]:02X} is not valid UTF-8. Save the file as UTF-8.",
            place(name, line, column),
        ) from error
    if len(data) > MAX_BYTES:
        raise SchemaError(
            f"The document is larger than {MAX_BYTES >> 20} MiB. Put long texts into files (src=).", name
        )
    return data


def own_texts(element: Element, *, inline: Sequence[str] = (), strip: bool = False) -> list[Element | str]:
    """The content of an element with white space as its author meant it.

    * Lines that hold nothing but tags (all but those in `inline`) leave no trace, nor do blank lines next to
      them; a line of text keeps its newline.
    * The indentation that all lines of the element's own text share is removed.
    * CDATA is kept to the character.

    Args:
        element: whose content.
        inline: tags that are part of the line they stand in.
        strip: remove all white space at the beginning and end of the content, too.
    """
    content = element.content
    margin = _margin(content, inline)
    made: list[Element | str] = []
    for index, part in enumerate(content):
        if isinstance(part, Element):
            made.append(part)
            continue
        text = part.text
        if not part.verbatim:
            before = content[index - 1] if index else None
            after = content[index + 1] if index + 1 < len(content) else None
            text = _spaced(text, margin, _breaks(before, inline), _breaks(after, inline))
            if strip and before is None:
                text = text.lstrip()
            if strip and after is None:
                text = text.rstrip()
        if text and made and isinstance(made[-1], str):
            made[-1] += text
        elif text:
            made.append(text)
    return made


def _breaks(neighbour: Element | Chars | None, inline: Sequence[str]) -> str:
    """How text relates to what stands next to it: a "block" ends the line, "cdata", or "inline"."""
    if isinstance(neighbour, Chars):
        return "cdata"
    return "inline" if neighbour is not None and neighbour.tag in inline else "block"


def _margin(content: Sequence[Element | Chars], inline: Sequence[str]) -> int:
    """The indentation that all lines share, but for the first one."""
    margins: list[int] = []
    for index, part in enumerate(content):
        if isinstance(part, Element) or part.verbatim:
            continue
        margins += [len(indent) for indent in re.findall(r"\n([ \t]*)(?=[^\s])", part.text)]
        after = content[index + 1] if index + 1 < len(content) else None
        last = re.search(r"\n([ \t]*)\Z", part.text)
        if last and _breaks(after, inline) == "inline":
            margins.append(len(last[1]))
    return min(margins, default=0)


def _spaced(text: str, margin: int, before: str, after: str) -> str:
    if not text.strip() and before != "inline" and after != "inline":
        return "" if "\n" in text or (before, after) == ("block", "block") else text
    text = re.sub(r"\n([ \t]*)", lambda found: "\n" + found[1][margin:], text)
    if before == "block":
        head = text[: len(text) - len(text.lstrip())]
        text = text[head.rfind("\n") + 1 :]
    if after != "inline":
        body = text.rstrip()
        line, newline, _ = text[len(body) :].partition("\n")
        text = body + line + newline
    return text
