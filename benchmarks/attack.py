"""What does a tenant under attack by another lose?

A neighbour's request (a prompt of 64 tokens, new each time, and 16 tokens of reply, streamed) is timed alone and while
a user of another organisation attacks the server in each of these ways:

* six schemas to encode at a time, by clients that leave and come again;
* six forged tokens at a time that name a trusted issuer whose key set comes byte by byte;
* bodies of 200 KB and 1 MB of which every element is wrong;
* a request for 128 answers, again and again;
* 64 requests waiting;
* 1,000 connections that sent half of their headers, or half of a body;
* prompts of 4,000 tokens, given up soon after they were sent;
* documents registered and forgotten, and all of the user's forgotten.

It should take at most twice its time alone and 200 ms more, and the server's memory should not grow. The attacker is a
process of the lowest priority, as it would be on a machine of its own.

    python benchmarks/attack.py --json attack.json
    python benchmarks/attack.py --fair

`--fair` measures how soon one request of one user starts beside 64 of another's, in seconds and in steps of the engine,
and what both together get done in a second, against the same requests of a single user.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import random
import re
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from ostinato import Engine, SamplingParams
from ostinato.access.access import Access
from ostinato.access.principal import Principal
from ostinato.access.tokens import Issuer
from ostinato.server.listen import raise_open_files
from prober import MODEL, insert, started

MARKERS = ("<!-- attack: begin -->", "<!-- attack: end -->")
PROMPT, REPLY = 64, 16
TIMES, MORE = 2.0, 0.2
"""What a request may take under attack: so many times what it takes alone, and so many seconds."""
GIVEN_UP = 120.0
"""Seconds after which a neighbour's request counts as not answered."""
SETTLED = 3.0
"""Seconds that an attack goes on before the neighbour asks."""
AFTERWARDS = 60.0
"""Seconds that the server has to end what an attacker that is gone has begun."""
CONNECTIONS = 1_000
ISSUER, AUDIENCE = "https://login.victim.example", "ostinato"
KV_TOKENS = 32_768
MANY = 64
"""Requests of the user that another one waits beside."""
THEIRS = 32
"""Tokens of each one's reply."""
ENOUGH = 0.98
"""Of what one user gets done, what two must together."""


def prompt_of(tokens: int, draw: random.Random) -> list[int]:
    """A prompt that nobody has asked before."""
    return [draw.randrange(1_000, 40_000) for _ in range(tokens)]


def completion(tokens: int, reply: int, draw: random.Random, **fields: Any) -> dict[str, Any]:
    """The body of a request."""
    asked = {"model": MODEL, "prompt": prompt_of(tokens, draw), "max_tokens": reply, "ignore_eos": True}
    return asked | fields


# -- attacks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The server, and with what credential it is attacked."""

    url: str
    key: str


class Attacker:
    """One user's clients, which do the same again and again."""

    def __init__(self, target: Target) -> None:
        self.draw = random.Random()
        self.host, _, port = target.url.removeprefix("http://").partition("/")[0].partition(":")
        self.port = int(port)
        self.key = target.key
        self.client = httpx.AsyncClient(
            base_url=target.url,
            headers={"Authorization": f"Bearer {target.key}"},
            timeout=GIVEN_UP,
            limits=httpx.Limits(max_connections=None),
        )

    async def again(self, clients: int, act: Callable[[], Awaitable[object]]) -> None:
        """So many clients at once, for ever."""

        async def one() -> None:
            while True:
                with suppress(httpx.HTTPError, OSError, asyncio.IncompleteReadError):
                    await act()
                await asyncio.sleep(0.005)  # what is refused at once is not asked for without a breath

        await asyncio.gather(*(one() for _ in range(clients)))

    async def leave(self, after: float, **request: Any) -> None:
        """Ask, and go away before the answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(after):
                await self.client.request("POST", **request)

    def words(self, count: int) -> str:
        return " ".join(f"{self.draw.randrange(10**6)}" for _ in range(count))

    async def encode(self) -> None:
        modules = "".join(f'<module name="m{number}">{self.words(100)}</module>' for number in range(20))
        pml = f'<schema name="s{self.draw.randrange(10**9)}">{modules}</schema>'
        await self.leave(1.0, url="/schemas", json={"pml": pml, "encode": True})

    async def forged(self) -> None:
        told = {"alg": "RS256", "kid": str(self.draw.random()), "typ": "JWT"}
        claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "root", "exp": int(time.time()) + 600}
        parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (told, claims)]
        token = b".".join((*parts, b"A" * 342)).decode()
        await self.client.get("/models", headers={"Authorization": f"Bearer {token}"})

    async def wrong(self) -> None:
        size = self.draw.choice((200_000, 1_000_000))
        content = b'{"model": "' + MODEL.encode() + b'", "messages": [' + b"1, " * (size // 3) + b"1]}"
        headers = {"Content-Type": "application/json"}
        await self.client.post("/chat/completions", content=content, headers=headers)

    async def answers(self) -> None:
        await self.client.post("/completions", json=completion(200, 64, self.draw, n=128))

    async def waiting(self) -> None:
        await self.client.post("/completions", json=completion(PROMPT, THEIRS, self.draw))

    async def half(self) -> None:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
        body = f'Authorization: Bearer {self.key}\r\nContent-Length: 1000\r\n\r\n{{"model": '
        said = self.draw.choice((head, head + body))
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(said.encode())
            await reader.read()  # until the server closes it
        finally:
            writer.close()

    async def long(self) -> None:
        await self.leave(0.5, url="/completions", json=completion(4_000, 1, self.draw))

    async def forgetting(self) -> None:
        body = {"text": self.words(2_000), "name": f"d{self.draw.randrange(10**9)}"}
        made = await self.client.post("/documents", json=body)
        if made.status_code == 201:
            await self.client.post("/forget", json={"document": made.json()["id"]})
        await self.client.post("/forget", json={"session": f"s{self.draw.randrange(10**9)}"})
        await self.client.post("/forget", json={"user": "mallory"})


@dataclass(frozen=True)
class Attack:
    """A way to attack, and by how many clients at once."""

    name: str
    clients: int
    act: Callable[[Attacker], Awaitable[object]]


ATTACKS = {
    "encode": Attack("6 schemas to encode, clients leave", 6, Attacker.encode),
    "forged": Attack("6 forged tokens, key set dripping", 6, Attacker.forged),
    "wrong": Attack("wrong bodies of 200 KB and 1 MB", 2, Attacker.wrong),
    "answers": Attack("n = 128", 1, Attacker.answers),
    "waiting": Attack("64 requests waiting", MANY, Attacker.waiting),
    "half": Attack("1,000 half-open connections", CONNECTIONS, Attacker.half),
    "long": Attack("prompts of 4,000 tokens, given up", 8, Attacker.long),
    "forgetting": Attack("documents and forgetting", 4, Attacker.forgetting),
}


def attack(name: str, target: Target) -> None:
    """Attack until the process is ended."""
    os.nice(19)
    raise_open_files()
    each = ATTACKS[name]

    async def run() -> None:
        attacker = Attacker(target)
        await attacker.again(each.clients, lambda: each.act(attacker))

    asyncio.run(run())


@contextmanager
def attacking(name: str, target: Target) -> Generator[None]:
    """Meanwhile the server is attacked, by a process of its own."""
    process = multiprocessing.get_context("spawn").Process(target=attack, args=(name, target), daemon=True)
    process.start()
    try:
        time.sleep(SETTLED)
        yield
        assert process.is_alive(), "the attack has ended by itself"
    finally:
        process.kill()
        process.join()


@contextmanager
def dripping() -> Generator[str]:
    """The address of a key set that never comes whole."""

    def answer(line: socket.socket) -> None:
        with line, suppress(OSError):
            line.recv(65_536)
            line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while True:
                line.sendall(b" ")
                time.sleep(0.2)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/jwks.json"


# -- the neighbour ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Of one request: seconds until the first token, and until the last."""

    first: float
    total: float


def ask(client: httpx.Client, draw: random.Random) -> Timing:
    """The neighbour's request; it has taken for ever if it was not answered whole."""
    body = completion(PROMPT, REPLY, draw, stream=True)
    began, first, done = time.perf_counter(), 0.0, False
    with suppress(httpx.HTTPError), client.stream("POST", "/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                done = "error" not in json.loads(line[6:])
            if time.perf_counter() - began > GIVEN_UP:
                done = False
                break
        done = done and response.status_code == 200
    return Timing(first, time.perf_counter() - began) if done else Timing(float("inf"), float("inf"))


@dataclass(frozen=True)
class Result:
    """What the neighbour had of the server, alone or under an attack."""

    attack: str
    median: float
    worst: float
    first: float
    """The median time to the first token."""
    grown_mib: float
    """Of the server's memory, since before the attack."""
    idle_after: float | None
    """Seconds until nothing of the attacker's was running or waiting any more; None: it went on."""


def times_of(
    client: httpx.Client, repeat: int, draw: random.Random, progress: Progress, task: TaskID
) -> list[Timing]:
    times: list[Timing] = []
    for _ in range(repeat):
        times.append(ask(client, draw))
        progress.advance(task)
    return times


def resident(process: int) -> float:
    """MiB of a process that are in memory."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    assert found
    return int(found[1]) / 1024


def idle_after(scraper: httpx.Client) -> float | None:
    """Seconds until no request runs or waits; None if that takes too long."""
    began = time.perf_counter()
    while (passed := time.perf_counter() - began) < AFTERWARDS:
        text = scraper.get("/metrics").text
        if all(
            float(n) == 0 for n in re.findall(r"^ostinato_requests_(?:running|waiting) (\S+)", text, re.M)
        ):
            return passed
        time.sleep(0.1)
    return None


def measure(names: Sequence[str], repeat: int, progress: Progress) -> list[Result]:
    """The neighbour alone, and under each attack."""
    draw = random.Random()
    results: list[Result] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        dripping() as issuer,
        started(Path(folder), "--kv-tokens", str(KV_TOKENS)) as (url, access, process),
    ):
        access.issuers.add(Issuer(ISSUER, AUDIENCE, issuer))
        target = Target(url, _key(access, "evil", "mallory"))
        neighbour = _client(url, _key(access, "acme", "alice"))
        scraper = _client(url.removesuffix("/v1"), _key(access, "hq", "scraper", "metrics"))
        with neighbour, scraper:
            task = progress.add_task("alone", total=(len(names) + 1) * repeat)
            ask(neighbour, draw)
            before = resident(process)
            times = times_of(neighbour, repeat, draw, progress, task)
            results.append(_result("alone", times, resident(process) - before, idle_after(scraper)))
            for name in names:
                progress.update(task, description=ATTACKS[name].name)
                before = resident(process)
                with attacking(name, target):
                    times = times_of(neighbour, repeat, draw, progress, task)
                    grown = resident(process) - before
                results.append(_result(ATTACKS[name].name, times, grown, idle_after(scraper)))
    return results


def _key(access: Access, org: str, user: str, *permissions: str) -> str:
    return access.keys.create(org, user, permissions=permissions)[1]


def _client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=GIVEN_UP)


def _result(name: str, times: Sequence[Timing], grown: float, idle: float | None) -> Result:
    totals = [each.total for each in times]
    first = statistics.median(each.first for each in times)
    return Result(name, statistics.median(totals), max(totals), first, grown, idle)


def table_of(results: Sequence[Result]) -> Table:
    """The results beside what they should be."""
    alone = results[0].median
    most = TIMES * alone + MORE
    table = Table(
        "attack",
        "median",
        "worst",
        "median TTFT",
        "of alone",
        f"at most {most:.2f} s",
        "memory grown",
        "idle after",
        box=MARKDOWN,
    )
    for each in results:
        within = "yes" if each.worst <= most else "median only" if each.median <= most else "no"
        table.add_row(
            each.attack,
            f"{each.median:.2f} s",
            f"{each.worst:.2f} s",
            f"{each.first:.2f} s",
            f"{each.median / alone:.2f}",
            within,
            f"{each.grown_mib:+.0f} MiB",
            "never" if each.idle_after is None else f"{each.idle_after:.1f} s",
        )
    return table


# -- fairness --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fair:
    """A user's one request beside many of another's, and all of them against as many of one user."""

    alone: float
    """Seconds to the first token of the one request, with nobody else there."""
    first: float
    """The same, beside the others."""
    queued: float
    """Seconds until it was taken into a step."""
    steps: int
    """Steps that were scheduled after it was there and before one that it was in."""
    two: float
    """Tokens a second, of both users."""
    one: float
    """Tokens a second, of a single user."""


def fairness(rounds: int, progress: Progress) -> Fair:
    """Medians over rounds of either kind, in turn. In one process: what HTTP adds is not what is asked here."""
    hog, other = Principal("evil", "mallory"), Principal("acme", "alice")
    reply = SamplingParams(max_tokens=THEIRS, temperature=0, ignore_eos=True)
    draw = random.Random(0)
    found: list[tuple[float, float, int, float]] = []
    single: list[float] = []
    task = progress.add_task("fair shares", total=2 * rounds)
    with Engine(MODEL, kv_tokens=KV_TOKENS) as engine:
        watch = _Watch(engine)
        replies = (engine.generate(prompt_of(PROMPT, draw), reply, principal=other) for _ in range(3))
        alone = [each.timing.ttft for each in replies]
        for _ in range(rounds):
            first, queued, steps, together = _round(engine, watch, hog, other, reply, draw)
            found.append((first, queued, steps, together))
            progress.advance(task)
            single.append(_round(engine, watch, hog, hog, reply, draw)[3])
            progress.advance(task)
    return Fair(
        statistics.median(alone),
        statistics.median(each[0] for each in found),
        statistics.median(each[1] for each in found),
        round(statistics.median(each[2] for each in found)),
        statistics.median(each[3] for each in found),
        statistics.median(single),
    )


class _Watch:
    """Counts the engine's steps between a request's coming and the first that it is in."""

    def __init__(self, engine: Engine) -> None:
        self.user = ""
        self.steps = 0
        """After which it was in one."""
        self._since: int | None = None
        schedule = engine.scheduler.schedule

        def watched() -> Any:
            there = [
                each
                for each in (*engine.scheduler.waiting, *engine.scheduler.running)
                if each.asker is not None and each.asker.user == self.user
            ]
            work = schedule()
            if there and self._since is None:
                self._since = 0
            if self._since is not None and self._since >= 0:
                if any(item.sequence in there for item in work):
                    self.steps, self._since = self._since, -1
                else:
                    self._since += 1
            return work

        engine.scheduler.schedule = watched

    def of(self, user: str) -> None:
        self.user, self.steps, self._since = user, 0, None


def _round(
    engine: Engine,
    watch: _Watch,
    hog: Principal,
    other: Principal,
    reply: SamplingParams,
    draw: random.Random,
) -> tuple[float, float, int, float]:
    """Many requests of one and, once those are being computed, one of the other: that one's TTFT, time queued and steps
    waited, and tokens a second of all."""
    prompts = [prompt_of(PROMPT, draw) for _ in range(MANY + 1)]
    watch.of("" if hog == other else other.user)
    began = time.perf_counter()
    streams = [engine.stream(prompt, reply, principal=hog) for prompt in prompts[:-1]]
    next(streams[0])
    last = engine.stream(prompts[-1], reply, principal=other)
    for stream in streams:
        for _ in stream:
            pass
    *_, end = last
    seconds = time.perf_counter() - began
    return end.timing.ttft, end.timing.queued, watch.steps, (MANY + 1) * (PROMPT + THEIRS) / seconds


def fair_table(fair: Fair) -> Table:
    """Fairness beside what it should be."""
    table = Table("measure", "figure", "bar", box=MARKDOWN)
    table.add_row("TTFT of the one request, alone", f"{fair.alone:.2f} s", "")
    table.add_row("TTFT beside 64 requests of another", f"{fair.first:.2f} s", "")
    table.add_row("queued", f"{fair.queued:.2f} s", "")
    table.add_row("steps before its first", f"{fair.steps}", f"at most 2: {_yes(fair.steps <= 2)}")
    table.add_row("tokens a second, one user", f"{fair.one:.1f}", "")
    ratio = fair.two / fair.one
    bar = f"{ratio:.3f}, at least {ENOUGH}: {_yes(ratio >= ENOUGH)}"
    table.add_row("tokens a second, both users", f"{fair.two:.1f}", bar)
    return table


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5, help="the neighbour's requests under each attack")
    parser.add_argument("--attacks", nargs="+", choices=[*ATTACKS], default=[*ATTACKS], help="which")
    parser.add_argument("--fair", action="store_true", help="measure fair shares, and no attacks")
    parser.add_argument("--rounds", type=int, default=3, help="of either kind, with --fair")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--docs", type=Path, help="put the table between the markers of this page")
    arguments = parser.parse_args()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        if arguments.fair:
            fair = fairness(arguments.rounds, progress)
            told: object = asdict(fair)
            table = fair_table(fair)
        else:
            results = measure(arguments.attacks, arguments.repeat, progress)
            told = [asdict(result) for result in results]
            table = table_of(results)
    Console(width=160).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1))
    if arguments.docs:
        begin, end = MARKERS
        markers = (begin.replace("attack", "fair"), end.replace("attack", "fair"))
        insert(table, arguments.docs, markers if arguments.fair else MARKERS)


if __name__ == "__main__":
    main()
