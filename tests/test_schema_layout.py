"""Layout and resolution of schemas: who stands where, and who sees whom."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import InvalidRequestError
from ostinato.models.catalogue import resolve as find_model
from ostinato.models.tokenizer import Tokenizer
from ostinato.prompt.chat import encode_chat
from ostinato.prompt.layout import Node, layout
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
    Union,
    use,
    user,
)
from ostinato.prompt.span import Chain, View
from schemas import byte_tokenizer, prompts, schemas

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


def cells(chains: tuple[Chain, ...], view: View) -> dict[int, int]:
    """Tokens by position of what a view shows."""
    chain = chains[view.chain]
    numbered = list(enumerate(chain.token_ids, chain.start))
    return dict(numbered[view.start : view.end])


def in_sight(chains: tuple[Chain, ...], index: int) -> dict[int, int]:
    """Tokens by position of what a chain sees; no position may come twice."""
    seen: dict[int, int] = {}
    for view in chains[index].sees:
        assert view.chain < index
        new = cells(chains, view)
        assert new, "an empty view"
        assert seen.keys().isdisjoint(new)
        seen |= new
    return seen


def whole(resolved: Resolved) -> list[tuple[int, int]]:
    """What the reply sees: positions and tokens."""
    chains = resolved.prompt.chains
    last = in_sight(chains, len(chains) - 1) | cells(chains, View(len(chains) - 1))
    return sorted(last.items())


def present_texts(node: Node, items: tuple[Item, ...]) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """The schema's texts that a prompt has, each with its owner and the owner's ancestors, innermost last."""
    imports = {item.name: item.items for item in items if isinstance(item, Import)}
    for child in node.children:
        if child.kind == "text":
            yield child, (node,)
        members = child.children if child.kind == "union" else (child,) if child.kind == "module" else ()
        chosen = [member for member in members if member.name in imports]
        if not chosen and child.scaffold is not None:
            chosen = [member for member in members if member.name == child.scaffold]
        for member in chosen:
            for text, owners in present_texts(member, imports.get(member.name, ())):
                yield text, (node, *owners)


def guaranteed(texts: list[tuple[Node, tuple[Node, ...]]], index: int) -> set[int]:
    """The positions a module's text may see, from the definition: never absent when it is, and before it."""
    text, owners = texts[index]
    isolated = [number for number, owner in enumerate(owners) if owner.isolated]
    allowed = owners[isolated[-1] :] if isolated else owners
    seen: set[int] = set()
    for other, its_owners in texts[:index]:
        owner = its_owners[-1]
        if any(owner is each for each in allowed) and owner.cache:
            assert other.end <= text.start
            seen |= set(range(other.start, other.end))
    return seen


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_positions(data: st.DataObject) -> None:
    schema = data.draw(schemas())

    def check(node: Node) -> None:
        at = node.start
        for child in node.children:
            assert child.start == (node.start if node.kind == "union" else at)
            at = max(at, child.end) if node.kind == "union" else child.end
            if child.kind == "text":
                assert child.length == sum(len(span.token_ids) for span in child.spans) > 0
            check(child)
        if node.kind in ("schema", "module", "union"):
            assert node.end == at

    check(layout(schema, BYTES).root)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_chains(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    prompt = data.draw(prompts(schema, whole=data.draw(st.booleans())))
    made = layout(schema, BYTES)
    results = {
        mode: resolve(made, prompt, mode=mode, link_tokens=data.draw(st.integers(1, 6))) for mode in MODES
    }
    exact = results["exact"].prompt.chains
    assert len(exact) == 1
    assert exact[0].start == 0
    assert exact[0].sees == ()
    for mode in ("modular", "linked"):
        chains = results[mode].prompt.chains
        assert [chain.start for chain in chains] == sorted(chain.start for chain in chains)
        for index, chain in enumerate(chains):
            assert chain.token_ids
            assert all(position < chain.start for position in in_sight(chains, index))
        # The reply sees all of the text, once.
        assert [token for _, token in whole(results[mode])] == list(exact[0].token_ids)
        assert whole(results[mode])[-1][0] == chains[-1].start + len(chains[-1].token_ids) - 1
        assert results[mode].placements == results["exact"].placements


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_module_sees_what_is_guaranteed(data: st.DataObject) -> None:
    schema = data.draw(schemas(scaffolds=False))
    prompt = data.draw(prompts(schema, whole=True))
    made = layout(schema, BYTES)
    texts = list(present_texts(made.root, prompt.items))
    all_positions = [position for position, _ in whole(resolve(made, prompt))]
    for mode in ("modular", "linked"):
        chains = resolve(made, prompt, mode=mode, link_tokens=2).prompt.chains
        for index, (text, owners) in enumerate(texts):
            tokens = tuple(token for span in text.spans for token in span.token_ids)
            here = [number for number, chain in enumerate(chains) if chain.start == text.start]
            full = [number for number in here if chains[number].token_ids == tokens]
            sights = [set(in_sight(chains, number)) for number in full]
            before = {position for position in all_positions if position < text.start}
            if not owners[-1].cache:
                assert sights == [before]
            elif guaranteed(texts, index) not in sights:
                # Recomputed as a whole, and no other text needs its cached states.
                assert all(set(in_sight(chains, number)) == before for number in here)
                assert len(tokens) <= (2 if mode == "linked" else 1)
                assert mode == "linked" or here[-1] == len(chains) - 1


def states(resolved: Resolved, paths: set[str]) -> Mapping[object, object]:
    """All that the states of modules depend on, by the module's path, position and tokens."""
    chains = resolved.prompt.chains
    identities: list[object] = []
    made: dict[object, object] = {}
    for chain in chains:
        context = tuple((identities[view.chain], view.start, view.end) for view in chain.sees)
        identities.append((chain.start, chain.token_ids, context))
        # The last chain is the prompt's own.
        if chain.name in paths and chain is not chains[-1]:
            made[chain.name, chain.start, chain.token_ids] = identities[-1]
    return made


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_module_has_the_same_states_in_every_prompt(data: st.DataObject) -> None:
    schema = data.draw(schemas(scaffolds=False))
    made = layout(schema, BYTES)
    cached = {node.path for node in _nodes(made.root) if node.kind == "module" and node.cache}
    one, other = (states(resolve(made, data.draw(prompts(schema))), cached) for _ in range(2))
    for key in one.keys() & other.keys():
        assert one[key] == other[key]


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def written(content: tuple[object, ...], items: tuple[Item, ...], arguments: Mapping[str, str]) -> str:
    """The text of a prompt by the meaning of PML alone."""
    imports = {item.name: item for item in items if isinstance(item, Import)}
    text = ""
    for child in content:
        if isinstance(child, Text):
            text += child.text
        elif isinstance(child, Parameter):
            text += arguments.get(child.name, child.scaffold or "")
        elif isinstance(child, Role):
            inner = written(child.children, items, arguments)
            text += f"<|im_start|>{child.role}\n{inner}<|im_end|>\n"
        elif isinstance(child, Module | Union):
            members = (child,) if isinstance(child, Module) else child.children
            chosen = [member for member in members if member.name in imports]
            if not chosen and isinstance(child, Union):
                chosen = [member for member in members if member.name == child.scaffold]
            for member in chosen:
                item = imports.get(member.name, Import(member.name))
                text += written(member.children, item.items, dict(item.arguments))
    return text


def only_imports(items: tuple[Item, ...]) -> tuple[Item, ...]:
    imports = [item for item in items if isinstance(item, Import)]
    return tuple(Import(item.name, item.arguments, only_imports(item.items)) for item in imports)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_text_is_what_pml_says(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    drawn = data.draw(prompts(schema))
    prompt = SchemaPrompt("s", (*only_imports(drawn.items), Turn("user", "why?")), drawn.arguments)
    resolved = resolve(layout(schema, BYTES), prompt, mode="exact")
    text = BYTES.decode(resolved.prompt.token_ids, skip_special=False)
    assert text == (
        written(schema.children, prompt.items, dict(prompt.arguments))
        + "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    )


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
        expected = [token for ids, _ in encode_chat(tokenizer, chat) for token in ids]
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
        for node in _nodes(root)
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
