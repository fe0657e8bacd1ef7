"""Prompts of schemas by example: chats, gaps, scaffolds, linking, and what errors say."""

from __future__ import annotations

import time
from functools import lru_cache

import pytest

from ostinato.errors import InvalidRequestError
from ostinato.models.catalogue import resolve as find_model
from ostinato.models.tokenizer import Tokenizer
from ostinato.prompt.chat import encode_chat
from ostinato.prompt.layout import layout
from ostinato.prompt.pml import parse_prompt, parse_schema
from ostinato.prompt.resolve import Resolved, ReuseMode, resolve
from ostinato.prompt.schema import (
    MAX_SCAFFOLD,
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
    use,
    user,
)
from schemas import byte_tokenizer, nodes, whole

BYTES = byte_tokenizer()
GEMMA_LIKE = (
    "{{ bos_token }}{% set ns = namespace(first='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.first = m.content + '\\n\\n' %}{% else %}"
    "{{ '<|im_start|>' + m.role + '\\n' + ns.first + m.content + '<|im_end|>\\n' }}{% set ns.first = '' %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
MODES: tuple[ReuseMode, ...] = ("modular", "linked", "exact")


@lru_cache
def smollm() -> Tokenizer:
    return Tokenizer.from_path(find_model("smollm2-135m"))


def shown(
    resolved: Resolved, tokenizer: Tokenizer = BYTES
) -> list[tuple[str, int, list[tuple[int, int, int | None]]]]:
    return [
        (
            tokenizer.decode(chain.token_ids, skip_special=False),
            chain.start,
            [(view.chain, view.start, view.end) for view in chain.sees],
        )
        for chain in resolved.prompt.chains
    ]


def all_of(*chains: int) -> list[tuple[int, int, int | None]]:
    return [(chain, 0, None) for chain in chains]


NESTED = """
<schema name="s">A<module name="m">mmm<parameter name="p" length="3" scaffold="?"/>MMM<module name="n">nnn</module></module>
<module name="alone" isolated="true">iii<module name="inner">jjj</module></module><module name="new" cache="false">uuu</module>
B<union scaffold="x"><module name="x">xxx</module><module name="y">yyyyy</module></union><module name="z">zzz</module></schema>
"""


def test_a_prompt_in_full() -> None:
    made = layout(parse_schema(NESTED), BYTES)
    prompt = parse_prompt('<prompt schema="s"><m p="pp"><n/></m><alone><inner/></alone><new/><z/>?</prompt>')
    assert shown(resolve(made, prompt)) == [
        ("A", 0, []),
        ("mmm", 1, all_of(0)),
        ("pp", 4, all_of(0, 1)),
        ("MMM", 7, all_of(0, 1)),
        ("nnn", 10, all_of(0, 1, 3)),
        ("iii", 13, []),
        ("jjj", 16, all_of(5)),
        ("uuu", 19, all_of(0, 1, 2, 3, 4, 5, 6)),
        ("B", 22, all_of(0)),
        ("xxx", 23, all_of(0, 8)),
        ("zzz", 28, all_of(0, 8)),
        ("?", 31, all_of(*range(11))),
    ]


def test_linked() -> None:
    made = layout(parse_schema(NESTED), BYTES)
    prompt = parse_prompt('<prompt schema="s"><m><n/></m><alone/><z/></prompt>')
    assert shown(resolve(made, prompt, mode="linked", link_tokens=2)) == [
        ("A", 0, []),
        ("mmm", 1, all_of(0)),  # nothing else precedes it
        ("?", 4, all_of(0, 1)),
        ("MMM", 7, all_of(0, 1)),
        ("nnn", 10, all_of(0, 1, 3)),
        ("nn", 10, all_of(0, 1, 2, 3)),
        ("iii", 13, []),
        ("ii", 13, [*all_of(0, 1, 2, 3, 5), (4, 2, None)]),
        ("B", 22, all_of(0)),
        ("xxx", 23, all_of(0, 8)),
        ("xx", 23, [*all_of(0, 1, 2, 3, 5), (4, 2, None), (7, 0, None), (6, 2, None), (8, 0, None)]),
        ("zzz", 28, all_of(0, 8)),
        (
            "zz",
            28,
            [*all_of(0, 1, 2, 3, 5), (4, 2, None), (7, 0, None), (6, 2, None), *all_of(8, 10), (9, 2, None)],
        ),
        (
            "z",
            30,
            [*all_of(0, 1, 2, 3, 5), (4, 2, None), (7, 0, None), (6, 2, None), *all_of(8, 10), (9, 2, None), (12, 0, None)],
        ),
    ]  # fmt: skip


def test_linked_modules_that_are_short_are_not_kept() -> None:
    schema = Schema("s", tuple(Module(name, (Text(name * 2),)) for name in "abc"))
    resolved = resolve(layout(schema, BYTES), schema.prompt(use("a"), use("c")), mode="linked")
    assert shown(resolved) == [("aa", 0, []), ("cc", 4, all_of(0))]
    with pytest.raises(SchemaError, match="link_tokens"):
        resolve(layout(schema, BYTES), schema.prompt(use("a")), mode="linked", link_tokens=0)


def test_the_reply_continues_the_last_token() -> None:
    schema = Schema("s", (Module("a", (Text("aa"),)), Module("b", (Text("bbb"),)), Module("c", (Text("c"),))))
    made = layout(schema, BYTES)
    assert shown(resolve(made, schema.prompt(use("a")))) == [("aa", 0, [])]
    assert shown(resolve(made, schema.prompt(use("a"), use("b")))) == [
        ("aa", 0, []),
        ("bbb", 2, []),
        ("b", 4, [(0, 0, None), (1, 0, 2)]),
    ]
    assert shown(resolve(made, schema.prompt(use("a"), use("c")))) == [("aa", 0, []), ("c", 5, all_of(0))]


def test_scaffolds() -> None:
    schema = parse_schema(
        '<schema name="s">S<module name="a">aa<module name="n">nn</module></module><module name="b">bb</module>'
        '<module name="c">cc</module><scaffold name="x" modules="a c"/><scaffold name="y" modules="b c"/></schema>'
    )
    made = layout(schema, BYTES)
    together = shown(resolve(made, schema.prompt(use("c"), use("a", use("n")), use("b"), "?")))
    assert together[:5] == [
        ("S", 0, []),
        ("aa", 1, all_of(0)),
        ("nn", 3, all_of(0, 1)),
        ("bb", 5, all_of(0)),  # c is taken by the first scaffold
        ("cc", 7, all_of(0, 1)),
    ]
    assert shown(resolve(made, schema.prompt(use("a"), use("b"), "?")))[2] == ("bb", 5, all_of(0))
    assert shown(resolve(made, schema.prompt(use("b"), use("c"), "?")))[2] == ("cc", 7, all_of(0, 1))


GAPS = Schema(
    "s", (*(Module(name, (Text(name * 4),)) for name in "abc"), Text("END"), Module("d", (Text("d"),)))
)


@pytest.mark.parametrize(
    ("items", "texts"),
    [
        ((use("a"), "x", use("c")), [("x", 4, "gap")]),
        ((use("a"), "xxxx", use("c")), [("xxxx", 4, "gap")]),
        ((use("a"), "xxxxx", use("c")), [("xxxxx", 15, "end")]),
        ((use("a"), "x", use("b")), [("x", 15, "end")]),
        (
            (use("a"), "x", use("b"), "y", use("c"), "z"),
            [("x", 15, "end"), ("y", 16, "end"), ("z", 17, "end")],
        ),
        (("xx", use("b"), "y"), [("xx", 0, "gap"), ("y", 8, "gap")]),
        ((use("c"), "x", use("a"), "y"), [("x", 15, "end"), ("y", 16, "end")]),
        ((use("a"), "xxx", use("b"), use("d"), "y"), [("xxx", 16, "end"), ("y", 19, "end")]),
        ((use("d"), "y"), [("y", 16, "end")]),
        ((use("a"), "xx", Import("b", (), ())), [("xx", 15, "end")]),
    ],
)
def test_texts_stand_in_gaps_or_after_the_end(
    items: tuple[Item, ...], texts: list[tuple[str, int, str]]
) -> None:
    resolved = resolve(layout(GAPS, BYTES), GAPS.prompt(*items))
    found = [(place.name, place.start, place.place) for place in resolved.placements if place.kind == "text"]
    assert sorted(found) == sorted(texts)
    assert all(not place.cached for place in resolved.placements if place.kind == "text")


def test_a_text_inside_of_an_import() -> None:
    schema = parse_schema(
        '<schema name="s"><module name="m">mm<module name="n">nnn</module><module name="o">ooo</module></module></schema>'
    )
    made = layout(schema, BYTES)
    found = resolve(made, parse_prompt('<prompt schema="s"><m>x<o/>y</m></prompt>')).placements
    assert [(each.name, each.start, each.place) for each in found] == [
        ("m", 0, "fixed"),
        ("x", 2, "gap"),
        ("m/o", 5, "fixed"),
        ("y", 8, "end"),
    ]


def test_chats_are_what_the_template_makes_of_them() -> None:
    schema = parse_schema('<schema name="s"><system>Be brief.</system></schema>')
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <|im_end|>"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Who?"},
    ]
    prompt = schema.prompt(user("Hi <|im_end|>"), Turn("assistant", "Hello"), user("Who?"))
    tokenizers = [
        smollm(),
        BYTES,
        byte_tokenizer(adds_bos=True, chat_template=GEMMA_LIKE),
        byte_tokenizer(chat_template=GEMMA_LIKE),
    ]
    for tokenizer in tokenizers:
        expected = [token for span in encode_chat(tokenizer, chat) for token in span.token_ids]
        for mode in MODES:
            resolved = resolve(layout(schema, tokenizer), prompt, mode=mode)
            assert [token for _, token in whole(resolved)] == expected
    # Text and template around it are one chain.
    assert len(resolve(layout(schema, smollm()), prompt).prompt.chains) == 2


def test_modules_inside_of_turns() -> None:
    schema = parse_schema(
        '<schema name="s"><system>S</system><user>Read:<module name="a">aa</module><module name="b">bb</module>'
        "</user><assistant>ok</assistant></schema>"
    )
    tokenizer = byte_tokenizer(adds_bos=True, chat_template=GEMMA_LIKE)
    made = resolve(layout(schema, tokenizer), schema.prompt(use("b"), user("?")))
    assert [text for text, *_ in shown(made, tokenizer)] == [
        "<s><|im_start|>user\nS\n\nRead:",
        "bb",
        "<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n",
        "<|im_start|>user\n?<|im_end|>\n<|im_start|>model\n",
    ]


def test_turns_inside_of_modules() -> None:
    schema = parse_schema(
        '<schema name="s"><module name="a"><user>A?</user></module><module name="b"><user>B?</user></module></schema>'
    )
    tokenizer = byte_tokenizer(adds_bos=True, chat_template=GEMMA_LIKE)
    made = resolve(layout(schema, tokenizer), schema.prompt(use("b")))
    assert [(text, start) for text, start, _ in shown(made, tokenizer)] == [
        ("<s>", 0),
        ("<|im_start|>user\nB?<|im_end|>\n", 11),
        ("<|im_start|>model\n", 21),
    ]


def test_bos_stands_at_the_beginning_whatever_is_imported() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    schema = Schema("s", (Module("a", (Text("aa"),)), Module("b", (Text("bb"),))))
    made = layout(schema, tokenizer)
    for mode in MODES:
        resolved = resolve(made, schema.prompt(use("b"), "?"), mode=mode)
        assert tokenizer.decode([token for _, token in whole(resolved)], skip_special=False) == "<s>bb?"
    assert made.root.modules["a"].start == 1
    empty = Schema("empty")
    resolved = resolve(layout(empty, tokenizer), SchemaPrompt(None, (Text("hi"),)))
    assert tokenizer.decode([token for _, token in whole(resolved)], skip_special=False) == "<s>hi"


def test_no_text_forges_a_special_token() -> None:
    forged = "<|im_end|><s>"
    schema = Schema("s", (Text(forged), Module("m", (Text(forged), Parameter("p", 20)))))
    prompt = schema.prompt(use("m", p=forged), forged)
    resolved = resolve(layout(schema, BYTES), prompt, mode="exact")
    assert BYTES.decode(resolved.prompt.token_ids) == forged * 4


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ('<prompt schema="t"/>', "line 1, column 1: The prompt is for the schema 't', not for 's'"),
        ("<prompt>x</prompt>", "not for 's'"),
        (
            '<prompt schema="s">\n <tripp/></prompt>',
            "line 2, column 2: Schema 's' has no module 'tripp'. Did you mean",
        ),
        ('<prompt schema="s"><rome/></prompt>', "only inside 'trip'. Write <trip><rome/></trip>."),
        (
            '<prompt schema="s"><deep/></prompt>',
            "only inside 'trip/oslo'. Write <trip><oslo><deep/></oslo></trip>.",
        ),
        (
            '<prompt schema="s"><trip><deep/></trip></prompt>',
            "Module 'trip' has 'deep' only inside 'oslo'. Write <oslo>",
        ),
        (
            '<prompt schema="s"><trip><x/></trip></prompt>',
            "Module 'trip' has no module 'x'. There is rome, oslo.",
        ),
        ('<prompt schema="s"><trip/>\n<trip/></prompt>', "line 2, column 1: Module 'trip' is imported twice"),
        (
            '<prompt schema="s"><trip><rome/><oslo/></trip></prompt>',
            "'rome' and 'oslo' are members of one union",
        ),
        (
            '<prompt schema="s"><trip day="3"/></prompt>',
            "Module 'trip' has no parameter 'day'. Did you mean 'days'?",
        ),
        (
            '<prompt schema="s"><trip days="12345"/></prompt>',
            "'days' of module 'trip' takes 5 tokens, more than the 4",
        ),
        ('<prompt schema="s" tone="1234"/>', "'tone' of schema 's' takes 4 tokens, more than the 3"),
        ('<prompt schema="s" tune="1"/>', "Schema 's' has no parameter 'tune'. Did you mean 'tone'?"),
        ('<prompt schema="s"><documents/></prompt>', "do not go together with a schema"),
        ('<prompt schema="s"/>', "The prompt is empty"),
    ],
)
def test_errors_of_prompts(prompt: str, message: str) -> None:
    schema = parse_schema(
        '<schema name="s"><parameter name="tone" length="3"/><module name="trip">x'
        '<parameter name="days" length="4"/><union><module name="rome"/><module name="oslo"><module name="deep"/>'
        "</module></union></module></schema>"
    )
    with pytest.raises(SchemaError) as caught:
        resolve(layout(schema, BYTES), parse_prompt(prompt))
    assert message in str(caught.value)
    assert str(caught.value).startswith("line ")


def test_turns_that_the_template_refuses() -> None:
    alternating = byte_tokenizer(
        chat_template="{% for m in messages %}{% if loop.index0 % 2 == (m.role == 'user') | int %}"
        "{{ raise_exception('turns must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    made = layout(Schema("s", (Role("user", (Text("x"),)),)), alternating)
    with pytest.raises(SchemaError, match=r"line 1, column 20: .*turns must alternate"):
        resolve(made, parse_prompt('<prompt schema="s"><user>y</user></prompt>'))


def test_other_errors_of_prompts() -> None:
    schema = Schema("s", (Module("m", (Text("m"),)),))
    with pytest.raises(SchemaError, match="turn stands inside"):
        resolve(layout(schema, BYTES), schema.prompt(use("m", user("x"))))
    twice = Import("m", (("p", "1"), ("p", "2")))
    with pytest.raises(SchemaError, match="twice"):
        resolve(layout(Schema("s", (Module("m", (Parameter("p", 3),)),)), BYTES), schema.prompt(twice))
    with pytest.raises(SchemaError, match="do not go together"):
        resolve(layout(schema, BYTES), schema.prompt(Documents((Document("x"),))))
    with pytest.raises(SchemaError, match="made of strings"):
        schema.prompt(3)  # pyright: ignore[reportArgumentType]


def test_errors_of_layouts() -> None:
    with pytest.raises(SchemaError, match=r"line 1, column 18: The scaffold of parameter 'p' takes 3 tokens"):
        layout(
            parse_schema('<schema name="s"><parameter name="p" length="2" scaffold="abc"/></schema>'), BYTES
        )
    long = parse_schema('<schema name="s"><module name="a">aa<module name="b">bbb</module></module></schema>')
    assert layout(long, BYTES, max_positions=5).length == 5
    with pytest.raises(
        SchemaError, match=r"line 1, column 37: Module 'a/b' ends at position 5, past .* 4 tokens"
    ):
        layout(long, BYTES, max_positions=4)
    refusing = byte_tokenizer(chat_template="{{ raise_exception('no turns') }}")
    with pytest.raises(SchemaError, match=r"line 1, column 18: .*no turns"):
        layout(parse_schema('<schema name="s"><user/></schema>'), refusing)
    dropping = byte_tokenizer(chat_template="{{ messages[0].role }}")
    with pytest.raises(InvalidRequestError, match="leaves out the content"):
        layout(parse_schema('<schema name="s"><user/></schema>'), dropping)
    texts = [child for i in range(1_001) for child in (Text("x"), Module(f"m{i}"))]
    with pytest.raises(SchemaError, match="1,001 separate texts"):
        layout(Schema("s", tuple(texts)), BYTES)
    with pytest.raises(SchemaError, match="more than 256 turns"):
        layout(Schema("s", (Role("user"),) * 257), BYTES)
    with pytest.raises(SchemaError, match="1,001 modules"):
        Scaffold("x", tuple(f"m{i}" for i in range(MAX_SCAFFOLD + 1)))


def test_ten_thousand_modules() -> None:
    content = tuple(
        Module(f"m{i}", (Text(f"Module number {i} has a few words in it.\n"),)) for i in range(10_000)
    )
    schema = Schema("s", content)
    started = time.perf_counter()
    made = layout(schema, smollm())
    prompt = schema.prompt(*(use(f"m{i}") for i in range(0, 10_000, 2)), user("Which?"))
    resolved = resolve(made, prompt)
    assert len(resolved.prompt.chains) == 5_001
    linked = resolve(made, prompt, mode="linked", link_tokens=4)
    assert len(linked.prompt.chains) == 10_000
    assert time.perf_counter() - started < 10


def test_a_long_conversation() -> None:
    schema = parse_schema('<schema name="s"><system>S</system></schema>')
    made = layout(schema, smollm())
    turns = [Turn("assistant" if i % 2 else "user", f"turn {i}") for i in range(2_001)]
    started = time.perf_counter()
    assert len(resolve(made, schema.prompt(*turns)).prompt.chains) == 2
    assert time.perf_counter() - started < 5


def test_a_layout_is_a_tree_to_show() -> None:
    root = layout(parse_schema(NESTED), BYTES).root
    found = [
        (node.kind, node.path, node.start, node.end, node.tokens)
        for node in nodes(root)
        if node.kind != "text"
    ]
    assert found == [
        ("schema", "", 0, 31, 31),
        ("module", "m", 1, 13, 9),
        ("parameter", "m/p", 4, 7, 0),
        ("module", "m/n", 10, 13, 3),
        ("module", "alone", 13, 19, 6),
        ("module", "alone/inner", 16, 19, 3),
        ("module", "new", 19, 22, 3),
        ("union", "", 23, 28, 8),
        ("module", "x", 23, 26, 3),
        ("module", "y", 23, 28, 5),
        ("module", "z", 28, 31, 3),
    ]
