"""Limits of principals: exact whatever ends a request, and nobody's but their own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from ostinato import Engine
from ostinato.access.access import Access
from ostinato.access.principal import LOCAL
from ostinato.access.scope import Scope
from ostinato.cli import app
from ostinato.errors import InvalidRequestError
from ostinato.server.limits import LimitedError, Limits, Place
from server_fixtures import CHAT, COMPLETIONS, DEADLINE, idle, serving, wait_until

REQUESTS, TOKENS = 5, 600
WHO = st.sampled_from(["ann", "bob", "eve"])
ME = LOCAL.scope("user")


class Bookkeeping(RuleBasedStateMachine):
    """Limits against the plainest account of what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.limits = Limits(requests=REQUESTS, tokens=TOKENS, clock=lambda: self.now)
        self.places: list[tuple[str, Place, int]] = []
        self.owed: dict[str, float] = {"ann": 0, "bob": 0, "eve": 0}

    def held(self, who: str) -> int:
        return sum(count for whose, _, count in self.places if whose == who)

    @rule(who=WHO)
    def ask(self, who: str) -> None:
        if self.held(who) < REQUESTS:
            self.places.append((who, self.limits.place(who), 1))
        else:
            with pytest.raises(LimitedError) as caught:
                self.limits.place(who)
            assert int(caught.value.answer.headers["Retry-After"]) >= 1

    @precondition(lambda self: self.places)
    @rule(data=st.data(), count=st.integers(1, REQUESTS + 2))
    def hold(self, data: st.DataObject, count: int) -> None:
        number = data.draw(st.integers(0, len(self.places) - 1))
        who, place, held = self.places[number]
        if count > REQUESTS:
            with pytest.raises(InvalidRequestError):
                place.hold(count)
        elif count > held and self.held(who) - held + count > REQUESTS:
            with pytest.raises(LimitedError):
                place.hold(count)
        else:
            place.hold(count)
            self.places[number] = (who, place, count)

    @precondition(lambda self: self.places)
    @rule(data=st.data(), times=st.integers(1, 2))
    def leave(self, data: st.DataObject, times: int) -> None:
        _, place, _ = self.places.pop(data.draw(st.integers(0, len(self.places) - 1)))
        for _ in range(times):
            place.leave()

    @rule(who=WHO, tokens=st.integers(0, 2 * TOKENS))
    def charge(self, who: str, tokens: int) -> None:
        self.limits.charge(who, tokens)
        self.owed[who] += tokens

    @rule(seconds=st.integers(0, 200))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.owed = {who: max(0.0, owed - seconds * TOKENS / 60) for who, owed in self.owed.items()}

    @rule(who=WHO)
    def afford(self, who: str) -> None:
        if self.owed[who] < TOKENS:
            self.limits.afford(who)
            return
        with pytest.raises(LimitedError) as caught:
            self.limits.afford(who)
        seconds = int(caught.value.answer.headers["Retry-After"])
        self.wait(seconds)
        self.limits.afford(who)  # who waits as long as it was told is served

    @invariant()
    def is_exact(self) -> None:
        for who in self.owed:
            assert self.limits.running(who) == self.held(who) <= REQUESTS

    def teardown(self) -> None:
        for _, place, _ in self.places:
            place.leave()
        self.now += 1e6
        assert all(self.limits.running(who) == 0 for who in self.owed)


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)


def test_nothing_is_kept_of_those_who_have_left() -> None:
    now = 0.0
    limits = Limits(tokens=60, clock=lambda: now)
    for number in range(1_000):
        with limits.place(number) as place:
            place.charge(10)
        now += 1.0  # what each has used is refilled after ten
    assert limits.known <= 30
    unlimited = Limits()
    for number in range(100):
        with unlimited.place(number) as place:
            place.charge(10)
    assert unlimited.known == 0


# -- over HTTP -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), dtype="float32", kv_tokens=16_384) as engine:
        yield engine


def body(engine: Engine, **fields: Any) -> dict[str, Any]:
    asked = {"model": engine.model_name, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    return asked | {"max_tokens": 1, "ignore_eos": True} | fields


@contextmanager
def held(engine: Engine, asking: Callable[[], httpx.Response]) -> Generator[Future[httpx.Response]]:
    """A request that is being answered all the while, and is answered well in the end."""
    proceed, prepare = threading.Event(), engine.prepare

    def slow(*args: Any, **options: Any) -> Any:
        assert proceed.wait(DEADLINE)
        return prepare(*args, **options)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(engine, "prepare", slow)
        asked = pool.submit(asking)
        try:
            yield asked
        finally:
            proceed.set()
        assert asked.result().status_code == 200


def test_at_the_limit_of_requests(tiny: Engine) -> None:
    limits = Limits(requests=2)
    with serving(tiny, limits=limits) as url, httpx.Client(base_url=url, timeout=DEADLINE) as http:
        with held(tiny, lambda: http.post(CHAT, json=body(tiny, n=2))):
            wait_until(lambda: limits.running(ME) == 2)
            refused = http.post(CHAT, json=body(tiny))
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert "2 requests" in error["message"]
            anthropic = http.post("/v1/messages", json=body(tiny))
            assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (429, "rate_limit_error")
            assert http.get("/v1/models").status_code == 200
        assert http.post(CHAT, json=body(tiny, n=2)).status_code == 200
        never = http.post(CHAT, json=body(tiny, n=3))
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        samples = {
            sample.name: sample.value
            for family in text_string_to_metric_families(http.get("/metrics").text)
            for sample in family.samples
        }
        assert samples["ostinato_limited_total"] == 2


def test_others_are_not_limited(tiny: Engine) -> None:
    limits = Limits(requests=1)
    with Access(":memory:") as access, serving(tiny, access, limits=limits) as url:
        ann, too, bob = (
            {"authorization": f"Bearer {access.keys.create('acme', user)[1]}"}
            for user in ("ann", "ann", "bob")
        )

        def ask(headers: dict[str, str], **fields: Any) -> httpx.Response:
            return httpx.post(url + CHAT, json=body(tiny, **fields), headers=headers, timeout=DEADLINE)

        with held(tiny, lambda: ask(ann)):
            wait_until(lambda: limits.running(Scope("user", "acme", "ann")) == 1)
            # The limit is the user's, whichever of its keys it comes with.
            assert [ask(each).status_code for each in (ann, too)] == [429, 429]
            # Of what is asked the engine, nothing yet is answered; but bob is let in.
            assert ask(bob, messages=[]).status_code == 400
        assert [ask(each).status_code for each in (ann, too, bob)] == [200, 200, 200]


def test_tokens_a_minute(tiny: Engine) -> None:
    now = 0.0
    limits = Limits(tokens=120, clock=lambda: now)
    tiny.clear_cache()
    with serving(tiny, limits=limits) as url, httpx.Client(base_url=url, timeout=DEADLINE) as http:
        long = body(tiny, max_tokens=100, messages=[{"role": "user", "content": "Count to a hundred."}])
        usage = http.post(CHAT, json=long).json()["usage"]
        cost = usage["total_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert cost >= 120, "the prompt and the answer are over the limit together"
        refused = http.post(CHAT, json=body(tiny))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "120 tokens a minute" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) == (cost - 120) // 2 + 1
        assert http.post(CHAT, json=body(tiny)).status_code == 429, "what is refused costs nothing"
        now += int(refused.headers["retry-after"])
        # What is found cached is not charged: this takes two tokens a time, and a second gives two.
        for _ in range(3):
            usage = http.post(CHAT, json=long | {"max_tokens": 1}).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
            now += 1


ENDINGS: dict[str, Callable[[httpx.Client, Engine], object]] = {
    "answered": lambda http, engine: http.post(CHAT, json=body(engine)),
    "streamed": lambda http, engine: http.post(CHAT, json=body(engine, stream=True, n=3)),
    "wrong": lambda http, engine: http.post(CHAT, json=body(engine, messages=[1])),
    "wrong in the engine": lambda http, engine: http.post(COMPLETIONS, json=body(engine, prompt=[10**6])),
    "no such model": lambda http, engine: http.post(CHAT, json=body(engine) | {"model": "gpt-5"}),
    "no such route": lambda http, engine: http.post("/v1/nothing", json=body(engine)),
    "too large": lambda http, _: http.post(CHAT, content=b"x" * 2_000_000),
    "left": lambda http, engine: _leave(http, engine),
    "left a stream": lambda http, engine: _leave_stream(http, engine),
}


def _leave(http: httpx.Client, engine: Engine) -> None:
    def leave() -> httpx.Response:
        with pytest.raises(httpx.ReadTimeout):
            http.post(CHAT, json=body(engine, n=4), timeout=httpx.Timeout(DEADLINE, read=0.1))
        return httpx.Response(200)

    with held(engine, leave) as left:
        left.result()


def _leave_stream(http: httpx.Client, engine: Engine) -> None:
    with http.stream("POST", CHAT, json=body(engine, max_tokens=400, n=4, stream=True)) as response:
        next(response.iter_lines())


@pytest.mark.parametrize("ending", ENDINGS)
def test_whatever_ends_a_request_gives_its_place_back(tiny: Engine, ending: str) -> None:
    limits = Limits(requests=8)
    with serving(tiny, limits=limits) as url, httpx.Client(base_url=url, timeout=DEADLINE) as http:
        ENDINGS[ending](http, tiny)
        wait_until(lambda: limits.running(ME) == 0)
        wait_until(lambda: idle(tiny))
        assert http.post(CHAT, json=body(tiny, n=8)).status_code == 200


def test_a_body_that_is_on_its_way_has_a_place(tiny: Engine) -> None:
    limits = Limits(requests=3)
    with serving(tiny, limits=limits) as url, httpx.Client(base_url=url, timeout=DEADLINE) as http:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as half:
            half.sendall(
                b"POST /v1/documents HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 4000000\r\n\r\n" + b" " * 2_500_000
            )
            # One for each MiB that has begun.
            wait_until(lambda: limits.running(ME) == 3)
            assert http.post(CHAT, json=body(tiny)).status_code == 429
        wait_until(lambda: limits.running(ME) == 0)
        # A body that would take more than there are is no reason to refuse it.
        registered = http.post("/v1/documents", json={"text": "x" * 4_000_000})
        assert registered.status_code == 201


def test_who_leaves_before_the_first_token_pays_for_its_prompt(tiny: Engine) -> None:
    limits = Limits(tokens=200)
    tiny.clear_cache()
    with serving(tiny, limits=limits) as url, httpx.Client(base_url=url, timeout=DEADLINE) as http:
        admitted, proceed, schedule = threading.Event(), threading.Event(), tiny.scheduler.schedule

        def slow() -> Any:
            work = schedule()
            admitted.set()
            assert proceed.wait(DEADLINE)
            return work

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny.scheduler, "schedule", slow)
            long = body(tiny, messages=[{"role": "user", "content": "word " * 70}])
            with pytest.raises(httpx.ReadTimeout):
                http.post(CHAT, json=long, timeout=httpx.Timeout(DEADLINE, read=0.5))
            assert admitted.wait(DEADLINE)
            wait_until(lambda: limits.running(ME) == 0)
            assert http.post(CHAT, json=body(tiny)).status_code == 429
            proceed.set()
        wait_until(lambda: idle(tiny))


@pytest.mark.parametrize(
    "limit", ["requests", "requests=", "requests=0", "tokens=-1", "bytes=5", "requests=²"]
)
def test_limits_on_the_command_line(limit: str) -> None:
    result = CliRunner().invoke(app, ["serve", "smollm2-135m", "--limit", limit])
    assert result.exit_code == 2
    assert f"--limit {limit} is no limit." in result.stderr
    assert "requests=64 or tokens=100000" in result.stderr
