"""A server with organisations on it that nobody was in before, and all that one who probes it is told."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from ostinato import Engine
from ostinato.access.access import Access
from ostinato.prompt.span import Span, plain
from server_fixtures import CHAT, COMPLETIONS, DEADLINE, idle, serving, wait_until

Json = dict[str, Any]

MESSAGES = "/v1/messages"

PEOPLE: dict[str, tuple[str, ...]] = {
    "alice": ("acme", "publish:org"),
    "bob": ("acme", "publish:org"),
    "carol": ("acme",),
    "dave": ("acme", "publish:org"),
    "boss": ("acme", "publish:org", "admin:org"),
    "mallory": ("evil", "publish:org", "publish:public"),
    "scraper": ("acme", "metrics"),
}
"""Each one's organisation and permissions."""

_numbers = itertools.count(1)
_VOLATILE = re.compile(
    r'"(created|seconds_ago|id|request_id)": ?(?:"[^"]*"|[-+.e0-9]+)|(?:chatcmpl|cmpl|msg|req|doc|sch)_?-?[0-9a-f]{24,}|document-[0-9a-f]{16}'
)
_HEADERS = frozenset({"date", "x-request-id", "request-id", "content-length"})


@dataclass
class Person:
    """Somebody with a key, and what the server has answered."""

    site: Site
    name: str
    key: str
    answers: list[httpx.Response] = field(default_factory=list[httpx.Response])

    def send(self, method: str, path: str, body: Json | None = None, **headers: str) -> httpx.Response:
        sent = {"authorization": f"Bearer {self.key}"} | headers
        answer = self.site.http.request(method, path, json=body, headers=sent)
        self.answers.append(answer)
        return answer

    def ask(self, path: str = CHAT, /, **fields: Any) -> httpx.Response:
        """A request for text, and no more than one token of it."""
        body: Json = {"model": self.site.engine.model_name, "max_tokens": 1, "temperature": 0}
        answer = self.send("POST", path, body | fields)
        assert answer.status_code == 200, answer.text
        return answer

    def complete(self, prompt: str, scope: str | None = None, **control: Any) -> httpx.Response:
        """Ask for what follows a text, with an explanation."""
        control |= {} if scope is None else {"scope": scope}
        named = {"cache_control": {"type": "ephemeral", **control}} if control else {}
        return self.ask(COMPLETIONS, prompt=prompt, explain=True, **named)

    def leave(self, path: str = CHAT, /, **fields: Any) -> None:
        """Begin a long answer, and leave when it has begun."""
        body: Json = {"model": self.site.engine.model_name, "max_tokens": 64, "stream": True}
        headers = {"authorization": f"Bearer {self.key}"}
        with self.site.http.stream("POST", path, json=body | fields, headers=headers) as answer:
            assert answer.status_code == 200
            next(answer.iter_raw())
        self.site.settle()

    def forget(self, **what: str) -> Json:
        answer = self.send("POST", "/v1/forget", what)
        assert answer.status_code == 200, answer.text
        return answer.json()


@dataclass
class Site:
    """Organisations on a server."""

    engine: Engine
    access: Access
    http: httpx.Client
    number: int
    people: dict[str, Person] = field(default_factory=dict[str, Person])

    def __getitem__(self, name: str) -> Person:
        return self.people[name]

    def join(self, name: str, org: str, *permissions: str) -> None:
        _, key = self.access.keys.create(f"{org}{self.number}", name, permissions=permissions)
        self.people[name] = Person(self, name, key)

    def anywhere(self, text: str) -> str:
        """What is said on this site as it would be on any other: without ids and times."""
        text = _VOLATILE.sub(lambda found: found.group(1) or "ID", text)
        return re.sub(rf"\b(acme|evil){self.number}\b", r"\1", text)

    def told(self, answer: httpx.Response) -> tuple[int, str, list[tuple[str, str]]]:
        """All of an answer, but for ids and times."""
        headers = sorted((name, value) for name, value in answer.headers.items() if name not in _HEADERS)
        return answer.status_code, self.anywhere(answer.text), headers

    def settle(self) -> None:
        """Wait until no request runs, and all that ran are counted."""
        wait_until(lambda: idle(self.engine))
        self.engine.cached_tokens(plain(Span((1,))))  # in turn, behind what the engine's thread does now

    def computed(self, act: Callable[[], object]) -> int:
        """How many prompt tokens the engine computes while somebody acts: what decides how long that takes."""
        self.settle()
        before = self.engine.stats()
        act()
        self.settle()
        after = self.engine.stats()
        return (after.prompt_tokens - before.prompt_tokens) - (after.cached_tokens - before.cached_tokens)


@dataclass
class Town:
    """A server that is made anew, as far as anybody on it can tell, as often as is needed."""

    engine: Engine
    access: Access
    http: httpx.Client

    def site(self) -> Site:
        """Organisations that are new; nothing is cached but the template's own text, which is everybody's."""
        self.engine.forget(lambda _: True)
        site = Site(self.engine, self.access, self.http, next(_numbers))
        for name, (org, *permissions) in PEOPLE.items():
            site.join(name, org, *permissions)
        site.join("first", "nobody")
        part = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A."}}
        for said in ("?", [part, {"type": "text", "text": "?"}]):
            for before in ([], [{"role": "system", "content": "Hm."}]):
                site["first"].ask(messages=[*before, {"role": "user", "content": said}])
        return site


@contextmanager
def town_of(engine: Engine) -> Generator[Town]:
    engine.index.pool.kv.zero_()  # memory is given as it is
    with (
        Access(":memory:") as access,
        serving(engine, access) as url,
        httpx.Client(base_url=url, timeout=DEADLINE) as http,
    ):
        yield Town(engine, access, http)


def sent_and_never(town: Town, victims: Callable[[Site], object]) -> Iterator[Site]:
    """Two sites that are the same, but that in the first the victims have acted."""
    for sent in (True, False):
        site = town.site()
        if sent:
            victims(site)
        yield site


def cached(answer: httpx.Response) -> int:
    """How many tokens an answer says were cached."""
    usage = answer.json()["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def explanation(answer: httpx.Response) -> Json:
    return answer.json()["ostinato"]["cache"]


def reasons(answer: httpx.Response) -> set[str]:
    return {span["miss"]["reason"] for span in explanation(answer)["spans"] if span.get("miss")}


def alike(told: list[Any]) -> bool:
    """Whether two sites have told the same; printed where they have not."""
    first, second = (json.dumps(each, indent=1, default=str) for each in told)
    if first != second:
        print(first, "\n--- never sent ---\n", second)
    return first == second
