"""Layout and resolution of schemas: who stands where, and who sees whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from ostinato.prompt.layout import Layout, Node, layout
from ostinato.prompt.resolve import Resolved, ReuseMode, resolve
from ostinato.prompt.schema import (
    Import,
    Item,
    Module,
    Parameter,
    Role,
    Schema,
    SchemaError,
    SchemaPrompt,
    Text,
    Turn,
    Union,
)
from schemas import byte_tokenizer, in_sight, nodes, prompts, schemas, whole

BYTES = byte_tokenizer()
MODES: tuple[ReuseMode, ...] = ("modular", "linked", "exact")


def chosen(data: st.DataObject, made: Layout, *, whole: bool = False) -> SchemaPrompt:
    """A prompt that is not empty."""
    prompt = data.draw(prompts(made.schema, whole=whole))
    try:
        resolve(made, prompt)
    except SchemaError as error:
        if "The prompt is empty" not in str(error):
            raise
        reject()
    return prompt


def present_texts(node: Node, items: tuple[Item, ...]) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """The schema's texts that a prompt has, each with its owner and the owner's ancestors, innermost last."""
    imports = {item.name: item.items for item in items if isinstance(item, Import)}
    for child in node.children:
        if child.kind == "text":
            yield child, (node,)
        members = child.children if child.kind == "union" else (child,) if child.kind == "module" else ()
        taken = [member for member in members if member.name in imports]
        if not taken and child.scaffold is not None:
            taken = [member for member in members if member.name == child.scaffold]
        for member in taken:
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


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=133, deadline=None)
@given(st.data())
def test_chains(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    made = layout(schema, BYTES)
    prompt = chosen(data, made, whole=data.draw(st.booleans()))
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


@settings(max_examples=133, deadline=None)
@given(st.data())
def test_a_module_sees_what_is_guaranteed(data: st.DataObject) -> None:
    schema = data.draw(schemas(scaffolds=False))
    made = layout(schema, BYTES)
    prompt = chosen(data, made, whole=True)
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


@settings(max_examples=66, deadline=None)
@given(st.data())
def test_a_module_has_the_same_states_in_every_prompt(data: st.DataObject) -> None:
    schema = data.draw(schemas(scaffolds=False))
    made = layout(schema, BYTES)
    cached = {node.path for node in nodes(made.root) if node.kind == "module" and node.cache}
    one, other = (states(resolve(made, chosen(data, made)), cached) for _ in range(2))
    for key in one.keys() & other.keys():
        assert one[key] == other[key]


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


@settings(max_examples=100, deadline=None)
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


def test_a_text_of_megabytes_is_refused_without_tokenising_it() -> None:
    tokenizer = byte_tokenizer()
    schema = Schema("huge", (Module("m", (Text("a" * 4_000_000),)),))
    with pytest.raises(SchemaError, match="Module 'm' has a text of 4,000,000 bytes"):
        layout(schema, tokenizer, max_positions=4096)
