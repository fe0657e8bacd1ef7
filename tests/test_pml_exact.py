"""Generated schemas, prompts and documents through the engine, against the dense reference, for every family."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import schemas
from dense import Families
from families import FAMILIES
from ostinato import SamplingParams
from ostinato.errors import InvalidRequestError
from ostinato.prompt.resolve import ReuseMode
from ostinato.prompt.schema import Document, Documents, Schema, SchemaPrompt, Text
from test_modules import check, seen_by_reply

MODES = st.sampled_from(("modular", "linked", "exact"))
QUIET = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory, kv_tokens=1024, block_size=4, max_batch_tokens=40)


@pytest.mark.parametrize("name", FAMILIES)
def test_schemas_equal_the_dense_reference(loaded: Families, name: str) -> None:
    engine, decoder = loaded(name)

    @QUIET
    @given(data=st.data(), mode=MODES, link=st.integers(1, 6))
    def run(data: st.DataObject, mode: ReuseMode, link: int) -> None:
        schema: Schema = data.draw(schemas.schemas(roles=False))
        prompt: SchemaPrompt = data.draw(schemas.prompts(schema))
        try:
            engine.register(schema)
            encoded = engine.encode(prompt, mode=mode, link_tokens=link)
        except InvalidRequestError:
            assume(False)
            raise
        assume(len(encoded.token_ids) < 220)
        check(engine, decoder, encoded)
        assert check(engine, decoder, encoded) == seen_by_reply(encoded) - 1

    with torch.inference_mode():
        run()
    assert engine.stats().slots_used == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_documents_equal_the_dense_reference(loaded: Families, name: str) -> None:
    engine, decoder = loaded(name)
    texts = ("The red house", "A mill was built here, long ago.", "Ferries leave at six", "Bees!", "x" * 40)

    @QUIET
    @given(
        chosen=st.lists(st.sampled_from(texts), min_size=1, max_size=4, unique=True),
        before=st.sampled_from(("", "Read: ")),
        after=st.sampled_from(("", "Who?")),
        mode=MODES,
        link=st.integers(1, 20),
    )
    def run(chosen: list[str], before: str, after: str, mode: ReuseMode, link: int) -> None:
        items = (
            *((Text(before),) if before else ()),
            Documents(tuple(Document(text) for text in chosen)),
            *((Text(after),) if after else ()),
        )
        encoded = engine.encode(SchemaPrompt(None, items), mode=mode, link_tokens=link)
        check(engine, decoder, encoded)
        assert check(engine, decoder, encoded) == seen_by_reply(encoded) - 1

    with torch.inference_mode():
        run()
    assert engine.stats().slots_used == 0


def test_documents_are_reused_in_any_order_and_number(loaded: Families) -> None:
    engine, _ = loaded("llama")
    engine.clear_cache()
    a, b, c = (Document(letter * 37) for letter in "abc")

    def ask(*documents: Document) -> int:
        prompt = SchemaPrompt(None, (Text("Read: "), Documents(documents), Text("And?")))
        return engine.generate(prompt, SamplingParams(max_tokens=1)).usage.cached_tokens

    assert ask(a, b, c) == 0
    assert ask(c, a) == len("Read: ") + 2 * (37 + 2)  # each with two newlines; only the question is new
    assert ask(b, c, a) == len("Read: ") + 3 * (37 + 2)


def test_a_replaced_schema_is_evicted_first(loaded: Families) -> None:
    engine, _ = loaded("llama")
    engine.clear_cache()
    schema = '<schema name="s"><module name="m">{}</module></schema>'
    prompt, one = '<prompt schema="s"><m/>Go</prompt>', SamplingParams(max_tokens=1)
    engine.register(schema.format("old text of the module " * 8))
    engine.generate(prompt, one)
    engine.generate([3] * 400, one)
    engine.register(schema.format("new text of the module " * 8))
    new = engine.generate(prompt, one)
    assert new.usage.cached_tokens == 0, "another text is another module"
    before = engine.stats()
    engine.generate([4] * 420, one)  # the pool is full: something has to go
    assert engine.stats().evicted_blocks > before.evicted_blocks
    assert engine.generate([3] * 400, one).usage.cached_tokens == 399, (
        "older than the replaced schema, but alive"
    )
    engine.register(schema.format("old text of the module " * 8))
    assert engine.generate(prompt, one).usage.cached_tokens < 20, "nearly all of the old one went"
    engine.unregister("s")
    with pytest.raises(InvalidRequestError, match="There is no schema 's'"):
        engine.generate(prompt, one)
