"""Token types: what the tokens of chats, documents, modules and replies are, and what that makes of a block."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato import Engine, SamplingParams
from ostinato.cache.use import TokenType
from ostinato.engine.sequence import Sequence, SequenceChain, sequence_chains
from ostinato.prompt.schema import SchemaPrompt, Turn
from ostinato.prompt.span import Chain, Prompt, Span, SpanKind, View, plain
from ostinato.server.messages import ChatMessage, items

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def sequence_of(prompt: Prompt, size: int = 16) -> Sequence:
    return Sequence(0, sequence_chains(prompt, b"model", size), ONE, 1)


def texts(engine: Engine, prompt: Prompt, kind: SpanKind) -> str:
    """All text of one kind in a prompt."""
    sequence = sequence_of(prompt)
    found = ""
    for chain in sequence.chains:
        start = 0
        for end, kind_of in chain.kinds:
            if kind_of == kind and chain.source is None:
                found += engine.tokenizer.decode(chain.token_ids[start:end]) + "|"
            start = end
    return found


def chain_of(*spans: tuple[SpanKind, int]) -> SequenceChain:
    return sequence_of(plain(*(Span((5,) * count, kind) for kind, count in spans))).last


@pytest.mark.parametrize(
    ("spans", "kind"),
    [
        ([("user", 9), ("system", 7)], "user"),
        ([("user", 8), ("assistant", 8)], "assistant"),  # the later, when even
        ([("user", 3), ("system", 5), ("user", 3), ("tool", 5)], "user"),  # in all, not in a row
        ([("template", 14), ("user", 2)], "user"),
        ([("template", 16)], "template"),
        ([("template", 15)], "decode"),  # and one that was generated
        ([("user", 7)], "decode"),
        ([("user", 8)], "decode"),
        ([("user", 9)], "user"),
    ],
)
def test_the_kind_of_a_block(spans: list[tuple[SpanKind, int]], kind: TokenType) -> None:
    chain = chain_of(*spans)
    chain.token_ids += [5] * (16 - len(chain.token_ids))
    assert chain.kind_of(0, 16) == kind


@given(
    st.lists(st.tuples(st.sampled_from(get_args(SpanKind)), st.integers(1, 9)), min_size=1, max_size=9),
    st.integers(0, 20),
)
def test_counting_kinds(spans: list[tuple[SpanKind, int]], generated: int) -> None:
    chain = chain_of(*spans)
    chain.token_ids += [5] * generated
    each: list[TokenType] = []
    for kind, count in spans:
        each.extend(kind for _ in range(count))
    each.extend("decode" for _ in range(generated))
    for start in range(0, len(each), 3):
        for end in range(start, len(each) + 1, 4):
            assert chain.count_kinds(start, end) == Counter(each[start:end])


def test_kinds_of_a_conversation(engine: Engine) -> None:
    engine.clear_cache()
    thought = (
        "<think>Rooks are black, and crows are black as well, so I should say how the beaks differ.</think>"
    )
    answer = {"role": "assistant", "content": f"{thought}A rook has a pale beak."}
    chat = [
        {"role": "system", "content": "You know birds, and you say what you know in few words, to anybody."},
        {"role": "user", "content": "How do I tell a rook from a crow, when both of them are far away?"},
        answer,
        {"role": "user", "content": "And a raven?"},
    ]
    reply = engine.generate(chat, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    prompt = engine.encode(chat)
    assert texts(engine, prompt, "reasoning") == thought + "|"
    assert texts(engine, prompt, "assistant") == "A rook has a pale beak.|"
    assert texts(engine, prompt, "user").endswith("And a raven?|")
    blocks = sorted(engine.index.store.blocks.values(), key=lambda block: block.offset)
    kinds = list(dict.fromkeys(block.kind for block in blocks))
    assert kinds[:3] == ["system", "user", "reasoning"]
    assert kinds[-1] == "decode", "what this request thinks is what it generates"
    assert [block.offset for block in blocks] == [16 * i for i in range(len(blocks))]
    assert [block.depth for block in blocks] == list(range(len(blocks)))
    before = engine.stats()
    again = engine.generate([*chat, {"role": "assistant", "content": reply.text}], ONE)
    engine.clear_cache()
    after = engine.stats()
    found = after.cached_kinds - before.cached_kinds
    assert found.total() == again.usage.cached_tokens
    assert found["assistant"] >= 12, "tokens that were generated are the assistant's by now"
    assert (after.prompt_kinds - before.prompt_kinds).total() == again.usage.prompt_tokens
    assert "decode" not in after.prompt_kinds


def test_reasoning_over_http(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}<|im_end|>{% if m.reasoning %}{{ m.reasoning }}<|im_end|>{% endif %}"
        "{{ m.content if m.content is string else m.content | map(attribute='text') | join }}<|im_end|>"
        "{% endfor %}"
    )
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    for fields in (
        {"content": "Yes.", "reasoning_content": "Is it?"},
        {"content": [{"type": "reasoning", "text": "Is it?"}, {"type": "text", "text": "Yes."}]},
        {"content": [{"type": "text", "text": "Yes."}], "reasoning": "Is it?"},
    ):
        message = ChatMessage.model_validate({"role": "assistant", **fields})
        message.check("messages[0]")
        prompt = engine.encode([message.for_template()])
        assert texts(engine, prompt, "reasoning") == "Is it?|"
        assert texts(engine, prompt, "assistant") == "Yes.|"
        assert items([message]) == (Turn("assistant", "Yes."),)


SCHEMA = """
<schema name="kinds">
  <system>You help walkers.<module name="law">Dogs are kept on the lead.</module></system>
  Paths are steep.
  <module name="talk">
    <user>Which shoes do I need?</user>
    <assistant>Stout ones.</assistant>
    It rains a lot.
  </module>
</schema>
"""


def test_kinds_over_a_schema(engine: Engine) -> None:
    engine.register(SCHEMA)
    prompt = engine.encode('<prompt schema="kinds"><law/><talk/>And socks?<user>Wool?</user></prompt>')
    engine.unregister("kinds")
    shown: dict[SpanKind, str] = {kind: texts(engine, prompt, kind) for kind in get_args(SpanKind)}
    assert shown["system"] == "You help walkers.|"
    assert "Dogs are kept on the lead." in shown["document"]
    assert "It rains a lot." in shown["document"]
    assert shown["assistant"] == "Stout ones.|"
    assert shown["user"] == "Which shoes do I need?|Wool?|"
    assert "Paths are steep." in shown["text"]
    assert "And socks?" in shown["text"]
    assert not shown["tool"] + shown["tools"] + shown["reasoning"]


def test_documents_are_documents(engine: Engine) -> None:
    part: dict[str, Any] = {"type": "document", "source": {"type": "text", "data": "Moths fly to lamps."}}
    messages = [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage.model_validate({"role": "user", "content": [part, {"type": "text", "text": "Why?"}]}),
    ]
    prompt = engine.schemas.resolve(SchemaPrompt(None, items(messages)), "modular", 16).prompt
    assert "Moths fly to lamps." in texts(engine, prompt, "document")
    assert "Be brief." in texts(engine, prompt, "system")
    assert texts(engine, prompt, "user") == "Why?|"


def test_a_prompt_begins_with_what_others_may_share() -> None:
    cases: list[tuple[list[tuple[SpanKind, int]], bool]] = [
        ([("template", 3), ("system", 20), ("user", 5)], True),
        ([("template", 3), ("user", 40)], False),
        ([("template", 15), ("user", 40)], False),
        ([("template", 16), ("user", 40)], True),
        ([("tools", 12), ("system", 2), ("user", 40)], False),
        ([("document", 16)], True),
        ([("system", 9)], False),
        ([("text", 40)], False),
    ]
    for spans, shared in cases:
        prompt = plain(*(Span((5,) * count, kind) for kind, count in spans))
        assert (sequence_of(prompt).shared_tokens >= 16) is shared, spans
    modules = Prompt((Chain((Span((5,)),)), Chain((Span((6,)),), 1, (View(0),))))
    assert sequence_of(modules).shared_tokens == 0


def starts(engine: Engine, *messages: tuple[str, str]) -> bytes:
    """What is known of the application of a chat."""
    chat = [{"role": role, "content": content} for role, content in messages]
    return sequence_of(engine.encode(chat)).starts(16)


def test_an_application_is_known_by_its_instructions(engine: Engine) -> None:
    birds = (
        "You know birds, and you say what you know in few words, to anybody who asks, by day and by night."
    )
    fish = birds.replace("birds", "fish")
    first = starts(engine, ("system", birds), ("user", "How do I tell a rook from a crow?"))
    assert first
    assert first == starts(
        engine, ("system", birds), ("user", "What do owls eat, and when do they, in the north?")
    )
    long = [
        ("user", "And in the south?"),
        ("assistant", "Mice, there as well."),
        ("user", "And on the islands?"),
    ]
    assert first == starts(engine, ("system", birds), *long)
    assert first != starts(engine, ("system", fish), ("user", "How do I tell a rook from a crow?"))
    assert (
        starts(
            engine, ("system", "Hi."), ("user", "A question that is longer than a block, since it goes on.")
        )
        == b""
    )


def test_a_prompt_of_modules_is_known_by_its_first() -> None:
    """What imports the same modules is one application's, whatever is asked about them."""

    def prompt(question: int) -> Prompt:
        module = Chain((Span((7,) * 40, "document"),), 0)
        return Prompt((module, Chain((Span((question,) * 30, "user"),), 40, (View(0, 40, 0),))))

    first, second = sequence_of(prompt(3)), sequence_of(prompt(4))
    assert first.has_modules
    assert first.starts(16) == second.starts(16) == first.chains[0].chain(16)[-1]
