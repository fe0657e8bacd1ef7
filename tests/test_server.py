"""The server as clients see it: OpenAI's own client, and raw HTTP, against the real model."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ostinato import Engine
from server_fixtures import CHAT, COMPLETIONS, DEADLINE, MODEL, idle, serving, wait_until

QUESTION = [{"role": "user", "content": "Name the three primary colours, and say one thing about each."}]


@pytest.fixture(scope="module")
def url(exact_engine: Engine) -> Iterator[str]:
    with serving(exact_engine) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE) as client:
        yield client


def async_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=3 * DEADLINE)


def chat(client: openai.OpenAI, messages: Any = QUESTION, **fields: Any) -> Any:
    fields = {"max_tokens": 12, "temperature": 0} | fields
    return client.chat.completions.create(model=MODEL, messages=messages, **fields)


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    fields = {"max_tokens": 8, "temperature": 0} | fields
    return client.completions.create(model=MODEL, prompt=prompt, **fields)


def events(body: str) -> list[Any]:
    """The events of a stream, which must be framed exactly."""
    assert body.endswith("\n\n")
    lines = body[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


# -- answers --------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-5")
    assert caught.value.code == "model_not_found"


def test_chat(client: openai.OpenAI) -> None:
    reply = chat(client, max_tokens=None, max_completion_tokens=12)
    choice, usage = reply.choices[0], reply.usage
    assert reply.object == "chat.completion"
    assert reply.model == MODEL
    assert reply.id.startswith("chatcmpl-")
    assert reply.system_fingerprint.startswith("fp_")
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12


def test_second_call_is_cached(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "Whether the wine-dark sea is dark, and of what wine?"}]
    cold, warm = chat(client, question), chat(client, question)
    assert cold.choices[0].message.content == warm.choices[0].message.content
    details = warm.usage.prompt_tokens_details
    # All but the last token, whose logits are needed.
    assert (
        details.cached_tokens == warm.usage.prompt_tokens - 1 > cold.usage.prompt_tokens_details.cached_tokens
    )
    *_, last = chat(client, question, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cached_tokens == details.cached_tokens


def test_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert all(piece.choices[0].delta.role is None for piece in pieces[1:])
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert [piece.choices[0].finish_reason for piece in pieces[-2:]] == [None, "length"]
    assert all(piece.usage is None for piece in pieces)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_framing(url: str) -> None:
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 3, "temperature": 0, "stream": True}
    response = httpx.post(url + CHAT, json=body, timeout=DEADLINE)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "data: [DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert chunks[-1]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert not any("usage" in chunk for chunk in chunks)


def test_completion_prompts(client: openai.OpenAI, exact_engine: Engine) -> None:
    texts = ["The capital of France is", "One, two, three,"]
    ids = [exact_engine.tokenizer.encode(text) for text in texts]
    alone = [complete(client, text).choices[0].text for text in texts]
    assert complete(client, ids[0]).choices[0].text == alone[0]
    for prompts in (texts, ids):
        reply = complete(client, prompts)
        assert [choice.index for choice in reply.choices] == [0, 1]
        assert [choice.text for choice in reply.choices] == alone
        assert reply.usage.prompt_tokens == sum(map(len, ids))
        assert reply.usage.completion_tokens == 16
    assert complete(client, texts[0], echo=True).choices[0].text == texts[0] + alone[0]
    echoed = "".join(chunk.choices[0].text for chunk in complete(client, texts[0], echo=True, stream=True))
    assert echoed == texts[0] + alone[0]


def test_completion_default_length_is_16(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="Once", extra_body={"ignore_eos": True})
    assert reply.usage
    assert reply.usage.completion_tokens == 16


def test_several_choices(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    alone = [chat(client, seed=7 + i, **fields) for i in range(3)]
    reply = chat(client, seed=7, n=3, **fields)
    contents = [choice.message.content for choice in reply.choices]
    assert contents == [each.choices[0].message.content for each in alone]
    assert len(set(contents)) > 1
    assert reply.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert reply.usage.completion_tokens == 24
    texts = {0: "", 1: "", 2: ""}
    for chunk in chat(client, seed=7, n=3, stream=True, **fields):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(texts.values()) == contents


def test_choices_of_a_new_prompt_are_not_called_cached(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "Nobody has asked before how many moths a lamp can hold. " * 4}]
    assert chat(client, question, n=4, max_tokens=1).usage.prompt_tokens_details.cached_tokens < 48


def test_narrow_sampling_is_greedy(client: openai.OpenAI) -> None:
    greedy = chat(client).choices[0].message.content
    narrow: list[dict[str, Any]] = [
        {"top_p": 1e-6},
        {"extra_body": {"top_k": 1}},
        {"extra_body": {"min_p": 1.0}},
    ]
    for fields in narrow:
        assert chat(client, temperature=2.0, **fields).choices[0].message.content == greedy
    off = {"extra_body": {"top_k": -1, "repetition_penalty": 1.0}}
    assert chat(client, presence_penalty=0, frequency_penalty=0, **off).choices[0].message.content == greedy


def test_penalties_and_bias(client: openai.OpenAI, exact_engine: Engine) -> None:
    token = exact_engine.tokenizer.encode(" colour")[0]
    word = exact_engine.tokenizer.decode([token])
    bias = {"logit_bias": {str(token): 100}}
    assert complete(client, "A", max_tokens=4, **bias).choices[0].text == word * 4
    # A penalty of 2 for each time the word was said outweighs a small bias sooner or later.
    small = {"logit_bias": {str(token): 30}, "max_tokens": 24}
    said = complete(client, "A", **small).choices[0].text.count(word)
    assert complete(client, "A", frequency_penalty=2.0, **small).choices[0].text.count(word) < said
    assert complete(client, "A", presence_penalty=-2.0, **small).choices[0].text.count(word) == said
    # A repetition penalty counts the prompt's words too.
    song = "The cat sat on the mat. " * 4 + "The"
    assert " cat" in complete(client, song).choices[0].text
    assert " cat" not in complete(client, song, extra_body={"repetition_penalty": 10.0}).choices[0].text


def test_stops(client: openai.OpenAI, exact_engine: Engine) -> None:
    text = complete(client, "1 2 3 4", max_tokens=16).choices[0].text
    word = text.split()[3]
    cut = text[: text.index(word)]
    for stop in (word, ["@@@", word]):
        reply = complete(client, "1 2 3 4", max_tokens=16, stop=stop)
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == (cut, "stop")
        streamed = list(complete(client, "1 2 3 4", max_tokens=16, stop=stop, stream=True))
        assert "".join(chunk.choices[0].text for chunk in streamed) == cut
        assert streamed[-1].choices[0].finish_reason == "stop"
    token = exact_engine.tokenizer.encode(text)[0]
    reply = complete(client, "1 2 3 4", max_tokens=16, extra_body={"stop_token_ids": [token]})
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens < 16


def test_chat_logprobs(client: openai.OpenAI) -> None:
    choice = chat(client, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert len(content) == 12
    assert b"".join(bytes(item.bytes) for item in content).decode() == choice.message.content
    for item in content:
        assert len(item.top_logprobs) == 3
        assert item.logprob == item.top_logprobs[0].logprob <= 0  # greedy takes the best
        assert [top.logprob for top in item.top_logprobs] == sorted(
            (top.logprob for top in item.top_logprobs), reverse=True
        )
    assert all(item.top_logprobs == [] for item in chat(client, logprobs=True).choices[0].logprobs.content)
    chunks = [chunk.choices[0] for chunk in chat(client, logprobs=True, top_logprobs=3, stream=True)]
    streamed = [item for chunk in chunks if chunk.logprobs for item in chunk.logprobs.content]
    assert [item.token for item in streamed] == [item.token for item in content]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    choice = complete(client, "Œuvres complètes : été,", logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 8
    assert logprobs.text_offset[0] == 0
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if "�" not in token:
            assert choice.text[offset:].startswith(token)
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)
    chunks = [c.choices[0] for c in complete(client, "Œuvres complètes : été,", logprobs=2, stream=True)]
    assert [at for chunk in chunks for at in chunk.logprobs.text_offset] == logprobs.text_offset


def test_content_parts_and_developer_role(client: openai.OpenAI) -> None:
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nthere"}]
    parts = [{"type": "text", "text": "Hi\n"}, {"type": "text", "text": "there"}]
    other = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert chat(client, plain).choices[0].message.content == chat(client, other).choices[0].message.content


def test_fields_that_change_nothing_are_accepted(client: openai.OpenAI) -> None:
    reply = chat(
        client,
        user="someone",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        response_format={"type": "text"},
        tools=[],
        extra_body={"prompt_cache_key": "k", "stop": None, "top_k": None, "from_the_future": 1},
    )
    assert reply.usage.completion_tokens == 12


# -- many clients, and clients that vanish --------------------------------------------------------------


def test_two_streams_at_once(url: str) -> None:
    async def run() -> list[int]:
        order: list[int] = []

        async def read(which: int) -> None:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"Count to {which + 20}."}],
                max_tokens=24,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                order.append(which)  # noqa: PERF401 (the order across streams is the point)

        async with async_client(url) as client:
            await asyncio.gather(read(0), read(1))
        return order

    order = asyncio.run(run())
    first_done = min(len(order) - 1 - order[::-1].index(which) for which in (0, 1))
    assert set(order[:first_done]) == {0, 1}, "one stream waited for the other to end"


LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": QUESTION,
    "max_tokens": 6000,
    "ignore_eos": True,
    "temperature": 0,
}


def test_client_leaves_a_stream(url: str, exact_engine: Engine) -> None:
    before = exact_engine.stats()
    with (
        httpx.Client(timeout=DEADLINE) as client,
        client.stream("POST", url + CHAT, json=LONG | {"stream": True, "n": 3}) as response,
    ):
        lines = response.iter_lines()
        for _ in range(12):
            next(lines)
        assert exact_engine.stats().slots_used > 0
    wait_until(lambda: idle(exact_engine))
    after = exact_engine.stats()
    assert after.requests_finished == before.requests_finished + 3
    assert after.completion_tokens - before.completion_tokens < 3 * 6000


def test_client_leaves_while_waiting_for_a_whole_answer(url: str, exact_engine: Engine) -> None:
    before = exact_engine.stats()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url + CHAT, json=LONG, timeout=httpx.Timeout(DEADLINE, read=0.5))
    wait_until(lambda: idle(exact_engine))
    assert exact_engine.stats().completion_tokens - before.completion_tokens < 6000


def test_clients_leave_at_any_moment(url: str, exact_engine: Engine) -> None:
    before = exact_engine.stats()

    async def run() -> None:
        async def leave_after(delay: float, stream: bool) -> None:
            async with httpx.AsyncClient(timeout=DEADLINE) as client:
                body = LONG | {"messages": [{"role": "user", "content": "word " * 2000}], "stream": stream}
                request = asyncio.create_task(client.post(url + CHAT, json=body))
                await asyncio.sleep(delay)
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)

        # From before the body is sent to well into the answer.
        await asyncio.gather(*(leave_after(0.002 * i, stream=i % 2 == 0) for i in range(60)))

    asyncio.run(run())
    wait_until(lambda: idle(exact_engine))
    assert exact_engine.stats().completion_tokens - before.completion_tokens < 6000


def test_client_leaves_while_its_prompt_is_encoded(
    url: str, client: openai.OpenAI, exact_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = exact_engine.stats()
    begun, proceed, encode = threading.Event(), threading.Event(), exact_engine._intake.encode  # pyright: ignore[reportPrivateUsage]

    def slow(prompt: Any, **options: Any) -> Any:
        begun.set()
        assert proceed.wait(DEADLINE)
        return encode(prompt, **options)

    with monkeypatch.context() as patch:
        patch.setattr(exact_engine._intake, "encode", slow)  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + CHAT, json=LONG, timeout=httpx.Timeout(DEADLINE, read=0.5))
        assert begun.wait(DEADLINE)
        time.sleep(0.2)  # for the server to notice; were it later, the test would only show less
        proceed.set()
    assert chat(client, max_tokens=1).choices  # by now the request that nobody waits for has come through
    wait_until(lambda: idle(exact_engine))
    assert exact_engine.stats().completion_tokens - before.completion_tokens < 6000


def test_a_client_that_does_not_read_holds_nobody_up(url: str, client: openai.OpenAI) -> None:
    body = {
        "model": MODEL,
        "prompt": "So",
        "max_tokens": 40,
        "stream": True,
        "logprobs": 20,
        "ignore_eos": True,
    }
    with (
        httpx.Client(timeout=DEADLINE) as slow,
        slow.stream("POST", url + COMPLETIONS, json=body) as response,
    ):
        assert chat(client).usage.completion_tokens == 12
        *chunks, done = events(response.read().decode())
    assert done == "data: [DONE]"
    assert sum(len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks) == 40


def test_200_clients_on_a_small_pool() -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> Any:
        return await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"What is {number} plus one?"}],
            max_tokens=4,
            temperature=0,
            extra_body={"ignore_eos": True},
        )

    async def run(url: str) -> list[Any]:
        async with async_client(url) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(200)))

    with Engine(MODEL, kv_tokens=512) as engine, serving(engine) as url:
        replies = asyncio.run(run(url))
        assert [reply.usage.completion_tokens for reply in replies] == [4] * 200
        wait_until(lambda: idle(engine))
        stats = engine.stats()
        assert stats.requests_finished == 200
        assert stats.slots_cached <= stats.slots_total
        too_long = httpx.post(
            url + CHAT, json={"model": MODEL, "messages": [{"role": "user", "content": "word " * 600}]}
        )
        assert too_long.status_code == 400
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        assert too_long.json()["error"]["param"] == "messages"


def test_engine_closes_under_a_stream() -> None:
    with Engine(MODEL, kv_tokens=4096) as engine, serving(engine) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        body = LONG | {"stream": True, "max_tokens": 3000}
        with httpx.stream("POST", url + CHAT, json=body, timeout=DEADLINE) as response:
            lines = response.iter_lines()
            next(lines)
            engine.close()
            *_, last = (line for line in lines if line)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_closed"
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503
        assert health.json()["error"]["type"] == "server_error"
        assert httpx.post(url + CHAT, json=LONG).status_code == 503


# -- what is measured -----------------------------------------------------------------------------------


def scrape(url: str) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_metrics(url: str, client: openai.OpenAI, exact_engine: Engine) -> None:
    before = scrape(url)
    usage = chat(client, max_tokens=5).usage
    wait_until(lambda: idle(exact_engine))
    after = scrape(url)

    def grown(*key: str) -> float:
        return after[key] - before.get(key, 0)

    assert grown("ostinato_prompt_tokens_total") == usage.prompt_tokens
    assert grown("ostinato_cached_tokens_total") == usage.prompt_tokens_details.cached_tokens
    for what in ("prompt", "cached"):
        kinds = {kind: grown(f"ostinato_{what}_tokens_by_kind_total", kind) for kind in ("user", "template")}
        assert sum(kinds.values()) == grown(f"ostinato_{what}_tokens_total")
        assert kinds["user"] > 0
    assert after["ostinato_sessions_total",] > 0
    assert after["ostinato_records_lost_total",] == 0
    [config] = [key for key in after if key[0] == "ostinato_cache_config_info"]
    assert set(config[1:]) == {
        exact_engine.policy,
        str(exact_engine.index.pool.block_size),
        str(exact_engine.index.pool.blocks),
    }
    assert grown("ostinato_completion_tokens_total") == usage.completion_tokens == 5
    assert grown("ostinato_requests_total", CHAT, "200") == 1
    assert grown("ostinato_time_to_first_token_seconds_count") == 1
    assert grown("ostinato_inter_token_latency_seconds_count") == 4
    assert grown("ostinato_request_duration_seconds_count") == 1
    slots = {state: after["ostinato_slots", state] for state in ("used", "cached", "free")}
    assert slots["used"] == 0
    assert slots["cached"] > 0
    assert sum(slots.values()) == exact_engine.stats().slots_total
