"""PML: what it means, what it survives, and what its errors say."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.prompt import markup, pml
from ostinato.prompt.pml import is_prompt, load_schema, parse_prompt, parse_schema, write_schema
from ostinato.prompt.schema import (
    Document,
    Documents,
    Import,
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
)
from schemas import prompts, schemas

TRAVEL = """
<schema name="travel">
  <!-- no text -->
  <system>
    You plan trips.
      Plan well.
  </system>
  <module name="trip">

    The trip takes <parameter name="days" length="4" scaffold="some"/> days,
    from <parameter name="from" length="3"/>
    <union scaffold="rome">
      <module name="rome">
        Rome
      </module>
      <module name="code" cache="false" isolated="true"><![CDATA[
  if a < b && c:
]]></module>
    </union>
  </module>
  Bye.
  <scaffold name="both" modules="trip trip/rome"/>
</schema>
"""


def test_a_schema() -> None:
    schema = parse_schema(TRAVEL)
    assert schema == Schema(
        "travel",
        (
            Role("system", (Text("You plan trips.\n  Plan well."),)),
            Module(
                "trip",
                (
                    Text("The trip takes "),
                    Parameter("days", 4, "some"),
                    Text(" days,\nfrom "),
                    Parameter("from", 3),
                    Text("\n"),
                    Union(
                        (
                            Module("rome", (Text("Rome\n"),)),
                            Module("code", (Text("\n  if a < b && c:\n"),), cache=False, isolated=True),
                        ),
                        "rome",
                    ),
                ),
            ),
            Text("Bye.\n"),
            Scaffold("both", ("trip", "trip/rome")),
        ),
    )


def test_a_prompt() -> None:
    prompt = parse_prompt(
        """<prompt schema="travel" tone="warm">
             <trip days="3"><rome/> Look: <code/></trip>
             In between.
             <user> What shall I see? </user>
             <assistant><![CDATA[ <b> ]]></assistant>
             At the end.
           </prompt>"""
    )
    assert prompt == SchemaPrompt(
        "travel",
        (
            Import("trip", (("days", "3"),), (Import("rome"), Text(" Look: "), Import("code"))),
            Text("In between.\n"),
            Turn("user", "What shall I see?"),
            Turn("assistant", " <b> "),
            Text("At the end."),
        ),
        (("tone", "warm"),),
    )


def test_documents() -> None:
    prompt = parse_prompt(
        "<prompt><documents><document title='A'>\n a\n  b\n</document><document>c</document></documents>"
        "<user>Which?</user></prompt>"
    )
    documents = Documents((Document("a\n b\n", "A"), Document("c")))
    assert prompt == SchemaPrompt(None, (documents, Turn("user", "Which?")))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (" a ", " a "),
        ("\n    a\n\n      b\n  ", "a\n\n  b\n"),
        ("a\n  b\n  c", "a\nb\nc"),
        ("\n\n  \n  a\n\n\n", "a\n"),
        ("\t\n\ta\n\t\tb", "a\n\tb"),
        ("\n  <!-- x -->a<!-- y -->\n", "a\n"),
        ("<![CDATA[ \n a ]]>", " \n a "),
        ("\n  <![CDATA[\n  a]]>\n  ", "\n  a"),
        ("x <![CDATA[<]]> y", "x < y"),
        ("x\n  <![CDATA[<]]>\n  y", "x\n<\ny"),
        ("<![CDATA[a]]]]><![CDATA[>b]]>", "a]]>b"),
        ("a &lt; b &amp;&amp; c &#233;\u00e9", "a < b && c éé"),
        ("a\r\nb", "a\nb"),
    ],
)
def test_white_space(content: str, text: str) -> None:
    assert parse_schema(f'<schema name="s"><module name="m">{content}</module></schema>') == Schema(
        "s", (Module("m", (Text(text),)),)
    )


def test_white_space_between_tags_is_no_text() -> None:
    schema = parse_schema('<schema name="s"> <module name="a"/> \n\n <module name="b">\n </module></schema>')
    assert schema == Schema("s", (Module("a"), Module("b")))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_round_trips(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    assert parse_schema(write_schema(schema)) == schema
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    prompt = data.draw(prompts(schema))
    assert SchemaPrompt.from_json(json.loads(json.dumps(prompt.to_json()))) == prompt


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='<>/=" &;!-[]?CDATAmoduleschema\n\0é', max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for source in (text, f'<schema name="s">{text}</schema>', f'<schema name="s"><module {text}'):
        error = None
        try:
            parse_schema(source)
        except SchemaError as refused:
            error = refused
        assert error is None or error.where.startswith("line ")


@pytest.mark.parametrize(
    ("source", "where", "message"),
    [
        ("", "line 1, column 1", "empty"),
        ("travel", "line 1, column 1", "does not begin with a tag"),
        ("<prompt/>", "line 1, column 1", 'Write <schema name="…">'),
        ("<schema/>", "line 1, column 1", 'lacks name. Write <schema name="…">'),
        ('<schema name="s"/><b/>', "line 1, column 19", "one root tag only"),
        ('<schema name="s">\n é a < b</schema>', "line 2, column 6", "write &lt; for < and &amp; for &"),
        ('<schema name="s">\n a && b</schema>', "line 2, column 5", "A & stands alone"),
        ('<schema name="s">\n a &nbsp; b</schema>', "line 2, column 4", "write &amp;nbsp;"),
        ('<schema name="s">\n x<y and z: List<int></schema>', "line 2, column 3", "CDATA"),
        ('<schema name="s"><module name="m">List<int></module></schema>', "line 1, column 44", "<int>, opened at"),
        ('<schema name="s"><br/></schema>', "line 1, column 18", "write &lt;br, wrap the text in <![CDATA[ … ]]>, or"),
        ('<schema name="s"><modul name="m"/></schema>', "line 1, column 18", "Did you mean 'module'?"),
        ('<schema name="s"><module name="m" scr="f"/></schema>', "line 1, column 18", "Did you mean 'src'?"),
        ('<schema name="s"><module name="m"></schema>', "line 1, column 35", "<module>, opened at line 1, column 18"),
        ('<schema name="s"><module name="m">', "line 1, column 35", "ends inside <module>"),
        ('<schema name="s" name="t"/>', "line 1, column 18", "same attribute twice"),
        ('<schema name="s">\0</schema>', "line 1, column 18", "U+0000"),
        ('<schema name="s"><?php echo ?></schema>', "line 1, column 18", "processing instruction"),
        ('<schema name="s t"/>', "line 1, column 1", "'s t' cannot name a schema"),
        ('<schema name=""/>', "line 1, column 1", "an empty name cannot name a schema"),
        ('<schema name="s">\n<module name="user"/></schema>', "line 2, column 1", "is a tag of prompts"),
        ('<schema name="s"><module name="m"/>\n<module name="m"/></schema>', "line 2, column 1", "two modules 'm'"),
        (
            '<schema name="s"><module name="m"/><user><union>\n<module name="m"/></union></user></schema>',
            "line 2, column 1",
            "two modules 'm'",
        ),
        (
            '<schema name="s"><parameter name="p" length="1"/>\n<parameter name="p" length="1"/></schema>',
            "line 2, column 1",
            "two parameters 'p'",
        ),
        ('<schema name="s"><parameter name="p"/></schema>', "line 1, column 18", "lacks length"),
        ('<schema name="s"><parameter name="p" length="0"/></schema>', "line 1, column 18", "1 to 1,000,000"),
        ('<schema name="s"><parameter name="p" length="x"/></schema>', "line 1, column 18", 'length="10"'),
        ('<schema name="s"><parameter name="p" length="1">x</parameter></schema>', "line 1, column 18", "no content"),
        ('<schema name="s"><parameter name="schema" length="1"/></schema>', "line 1, column 18", "Choose another name"),
        ('<schema name="s"><module name="m" cache="no"/></schema>', "line 1, column 18", 'cache="false"'),
        ('<schema name="s"><union/></schema>', "line 1, column 18", "needs a module"),
        ('<schema name="s"><union>x<module name="m"/></union></schema>', "line 1, column 18", "modules only"),
        (
            '<schema name="s"><union scaffold="n"><module name="m"/></union></schema>',
            "line 1, column 18",
            "none of its modules. There is m.",
        ),
        (
            '<schema name="s"><scaffold name="x" modules="cat dog"/><module name="cats"/></schema>',
            "line 1, column 18",
            "the module 'cat', which is not here. Did you mean 'cats'?",
        ),
        ('<schema name="s"><scaffold name="x" modules="m"/></schema>', "line 1, column 18", "two or more"),
        (
            '<schema name="s"><union><module name="a"/><module name="b"/></union>\n'
            '<scaffold name="x" modules="a b"/></schema>',
            "line 2, column 1",
            "members of one union",
        ),
        (
            '<schema name="s">\n<user><module name="m"><system/></module></user></schema>',
            "line 2, column 1",
            "turns do not nest",
        ),
    ],
)  # fmt: skip
def test_errors_of_schemas(source: str, where: str, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        parse_schema(source)
    assert str(caught.value).startswith(f"{where}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("<schema/>", 'Write <prompt schema="…">'),
        ("<prompt tone='x'/>", "takes no attribute 'tone'"),
        ("<prompt schema='s'>a < b</prompt>", "or wrap the text in"),
        ("<prompt schema='s'><user>see <m/></user></prompt>", "write &lt;m or wrap"),
        ("<prompt schema='s'><m><user>x</user></m></prompt>", "stands inside an import"),
        ("<prompt schema='s'><document>x</document></prompt>", "Put <documents> around it"),
        ("<prompt><documents>x</documents></prompt>", "holds tags only"),
        ("<prompt><documents><m/></documents></prompt>", "Write <document>"),
        ("<prompt schema='s'>" + "<m>" * 100, "more than 64 deep"),
    ],
)
def test_errors_of_prompts(source: str, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        parse_prompt(source)
    assert str(caught.value).startswith("line 1, column ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "declaration",
    [
        "<!DOCTYPE s>",
        '<!DOCTYPE s [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]>',
        '<!DOCTYPE s SYSTEM "file:///etc/passwd">',
        '<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]>',
        '<!DOCTYPE s [<!ENTITY % x SYSTEM "http://localhost/x"> %x;]>',
    ],
)
def test_a_doctype_is_refused(declaration: str) -> None:
    for parse, document in (
        (parse_schema, '<schema name="s">&a;&b;&x;</schema>'),
        (parse_prompt, "<prompt/>"),
    ):
        with pytest.raises(SchemaError, match="DOCTYPE"):
            parse(declaration + document)


def test_an_entity_bomb_costs_nothing() -> None:
    entities = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 30))
    started = time.perf_counter()
    with pytest.raises(SchemaError, match="DOCTYPE"):
        parse_schema(f'<!DOCTYPE s [<!ENTITY e0 "lol">{entities}]><schema name="s">&e29;</schema>')
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "ascii", "no-such"])
def test_a_document_is_utf8_whatever_it_claims(encoding: str) -> None:
    text = f'<?xml version="1.0" encoding="{encoding}"?><schema name="s">é</schema>'
    assert parse_schema(text) == parse_schema(text.encode()) == Schema("s", (Text("é"),))


def test_invalid_unicode() -> None:
    with pytest.raises(SchemaError, match="line 2, column 3: The byte 0xFF is not valid UTF-8"):
        parse_schema('<schema name="s">\n é'.encode() + b"\xff</schema>")
    with pytest.raises(SchemaError, match="surrogate"):
        parse_schema("<schema name='s'>\ud800</schema>")


def test_size_and_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    def nested(depth: int) -> str:
        tags = "".join(f'<module name="m{i}">' for i in range(depth))
        return f'<schema name="s">{tags}x{"</module>" * depth}</schema>'

    assert parse_schema(nested(64)).measure.depth == 64
    for depth in (65, 100, 100_000):
        with pytest.raises(SchemaError, match="more than 64 deep"):
            parse_schema(nested(depth))
    module = Module("m")
    for _ in range(63):
        module = Module("m", (module,))
    with pytest.raises(SchemaError, match="more than 64 deep"):
        Module("m", (module,))
    value: object = "x"
    for _ in range(500):
        value = {"type": "module", "name": "m", "children": [value]}
    with pytest.raises(SchemaError, match="more than 64 deep"):
        Schema.from_json({"name": "s", "children": [value]})
    monkeypatch.setattr(markup, "MAX_BYTES", 2**20)
    with pytest.raises(SchemaError, match="larger than 1 MiB"):
        parse_schema("<schema name='s'>" + "a" * 2**20 + "</schema>")


def test_ten_thousand_modules() -> None:
    modules = "".join(f'<module name="m{i}">Text {i}.</module>\n' for i in range(10_000))
    started = time.perf_counter()
    schema = parse_schema(f'<schema name="s">{modules}</schema>')
    assert schema.measure.modules == 10_000
    assert parse_schema(write_schema(schema)) == Schema.from_json(schema.to_json()) == schema
    assert time.perf_counter() - started < 5
    with pytest.raises(SchemaError, match="more than 10,000 modules"):
        parse_schema(f'<schema name="s">{modules}<module name="more"/></schema>')


def test_much_white_space_is_read_in_linear_time() -> None:
    started = time.perf_counter()
    for space in ("\n", " ", "\n ", " \n"):
        parse_schema(f'<schema name="s">a{space * 200_000}b<module name="m"/></schema>')
        is_prompt("<!-- -->" * 20_000 + space)
    assert time.perf_counter() - started < 3


def test_is_prompt() -> None:
    for text in (
        "<prompt>",
        ' \n<prompt schema="s"/>',
        '<?xml version="1.0"?> <!-- <a> --><!-- b --><prompt/>',
    ):
        assert is_prompt(text)
    for text in ("", "prompt", "<prompts>", "a <prompt>", "<!-- <prompt/>", "<schema/>"):
        assert not is_prompt(text)


def with_src(folder: Path, src: str, content: str = "") -> Schema:
    path = folder / "s.xml"
    path.write_text(f'<schema name="s">\n  <module name="m" src="{src}">{content}</module>\n</schema>')
    return load_schema(path)


def test_src(tmp_path: Path) -> None:
    code = "\n\n  if a < b && c:\r\n\treturn '</module>'  \n\n"
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "code.py").write_bytes(code.encode())
    (tmp_path / "link.py").symlink_to(tmp_path / "inner" / "code.py")
    for src in ("inner/code.py", "./inner/../inner/code.py", "link.py"):
        schema = with_src(tmp_path, src, '\n <module name="n">x</module>\n')
        assert schema == Schema("s", (Module("m", (Text(code), Module("n", (Text("x"),)))),))
        assert parse_schema(write_schema(schema)) == schema


def test_bad_src(tmp_path: Path) -> None:
    folder = tmp_path / "schemas"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "schemas-too").mkdir()
    (tmp_path / "schemas-too" / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "latin").write_bytes(b"caf\xe9")
    os.mkfifo(folder / "pipe")
    outside = (
        "../secret",
        "../../../../etc/passwd",
        "/etc/passwd",
        "link",
        "up/secret",
        "../schemas-too/secret",
        "",
    )
    for src in outside:
        with pytest.raises(SchemaError, match=r"s.xml, line 2, column 3: src=.* leads out of the folder"):
            with_src(folder, src)
    for src, message in {
        ".": "not a regular file",
        "pipe": "not a regular file",
        "gone.txt": "cannot be read: No such file",
        "s.xml/x": "cannot be read",
        "loop": "cannot be",
        "latin": "not valid UTF-8: byte 0xE9 at 3",
    }.items():
        with pytest.raises(SchemaError, match=rf"s.xml, line 2, column 3: .*{message}"):
            with_src(folder, src)
    with pytest.raises(SchemaError, match="and text of its own"):
        with_src(folder, "s.xml", "text")
    with pytest.raises(SchemaError, match="came as text"):
        parse_schema('<schema name="s"><module name="m" src="a"/></schema>')
    with pytest.raises(SchemaError, match="cannot be read: No such file"):
        load_schema(folder / "none.xml")


def test_a_large_src(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pml, "MAX_SRC_BYTES", 2**20)
    (tmp_path / "big").write_bytes(b"a" * (2**20 + 1))
    with pytest.raises(SchemaError, match="larger than 1 MiB"):
        with_src(tmp_path, "big")


def test_src_of_the_schema_itself_is_plain_text(tmp_path: Path) -> None:
    module = with_src(tmp_path, "s.xml").children[0]
    assert isinstance(module, Module)
    assert module.children == (Text((tmp_path / "s.xml").read_text()),)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "schema: This must be"),
        ({}, "schema: 'name' must be a string"),
        ({"name": "s", "extra": 1}, "schema: 'extra' is unknown here"),
        ({"name": "s", "children": {}}, "schema: 'children' must be a list"),
        ({"name": "s", "children": [1]}, "schema.children[0]: This must be"),
        ({"name": "s", "children": [{"type": "modul"}]}, "schema.children[0]: type 'modul' is unknown. Did you mean"),
        (
            {"name": "s", "children": ["x", {"type": "module", "name": "m", "children": [
                {"type": "parameter", "name": "p", "length": True}]}]},
            "schema.children[1].children[0]: Parameter 'p': length must be",
        ),
        ({"name": "s", "children": [{"type": "union", "children": ["x"]}]}, "A union holds modules only"),
        ({"name": "s", "children": [{"type": "module", "name": "m", "cache": 1}]}, "'cache' must be true or false"),
        ({"name": "s", "children": [{"type": "scaffold", "name": "x", "modules": [1]}]}, "modules[0]: This must be a"),
    ],
)  # fmt: skip
def test_errors_of_json(value: object, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        Schema.from_json(value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"items": [{"type": "turn", "role": "owner", "text": "x"}]}, "Role 'owner' is unknown"),
        (
            {"items": [{"type": "import", "name": "m", "arguments": {"a": 1}}]},
            "arguments.a: This must be a string",
        ),
        ({"items": [{"type": "use"}]}, "prompt.items[0]: type 'use' is unknown"),
        ({"schema": 3}, "'schema' must be a string"),
    ],
)
def test_errors_of_prompts_in_json(value: object, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        SchemaPrompt.from_json(value)
    assert message in str(caught.value)


def test_pml_does_not_write_what_xml_cannot_hold() -> None:
    for text in ("\0", "\ufffe", "a\r"):
        with pytest.raises(SchemaError, match="PML cannot hold"):
            write_schema(Schema("s", (Text(text),)))
    schema = Schema("s", (Text("a\r\n\r\rb"), Parameter("p", 2, "\r\n\"'<&\t")))
    assert parse_schema(write_schema(schema)) == schema
