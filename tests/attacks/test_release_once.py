"""`--release-once` against one who asks more than once: it finds its own, or what two others have sent, and no more."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx
import pytest

from attack_fixtures import Site, Town, alike, cached, reasons
from server_fixtures import COMPLETIONS

TEXT = "The merger with Hooli is signed on Friday at ten, and nobody else may know of it before that day has come."
MOST = len(TEXT) - 1
"""A token of this model is a byte, and the last is always computed."""


def ask(site: Site, who: str, text: str = TEXT, **control: Any) -> httpx.Response:
    return site[who].complete(text, "org", **control)


def forget(site: Site, who: str, answer: httpx.Response) -> int:
    return site[who].forget(request=answer.json()["id"])["tokens"]


def sends_it(site: Site) -> None:
    ask(site, "alice")


def keeps_nothing(site: Site) -> list[int]:
    """Asks twice, and has nothing kept that could be its own."""
    return [cached(ask(site, "bob", ttl=0)) for _ in range(3)]


def forgets_its_own(site: Site) -> list[int]:
    """Asks, forgets its own request and reads the count, and asks again."""
    found: list[int] = []
    for _ in range(3):
        answer = ask(site, "bob")
        found += [cached(answer), forget(site, "bob", answer)]
    return found


def forgets_itself(site: Site) -> list[int]:
    answer = ask(site, "bob", ttl="1h")
    return [cached(answer), site["bob"].forget(user="bob")["tokens"], cached(ask(site, "bob"))]


def lets_its_own_expire(site: Site) -> list[int]:
    return [cached(ask(site, "bob", ttl=0.001)) for _ in range(3)]


def extends_it(site: Site) -> list[int]:
    """Longer and shorter texts around the one it guesses."""
    return [
        value
        for size in (MOST + 1, 90, 55, 60, 50, 64, MOST)
        for answer in [ask(site, "bob", TEXT[:size])]
        for value in (cached(answer), forget(site, "bob", answer) if size % 2 else 0)
    ]


def asks_for_many(site: Site) -> list[int]:
    """Several answers to one prompt share its computation, or else tell that it is cached for somebody."""
    bob, named = site["bob"], {"scope": "org"}
    return [
        site.computed(partial(bob.ask, COMPLETIONS, prompt=TEXT, n=n, cache_control=named)) for n in (4, 2)
    ]


def asks_otherwise(site: Site) -> list[int]:
    """Other scopes, and another end of the text, sent before and behind."""
    bob = site["bob"]
    said = [
        {"role": "system", "content": TEXT, "cache_control": {"scope": "org"}},
        {"role": "user", "content": "?"},
    ]
    return [
        cached(bob.complete(TEXT)),
        cached(bob.ask(messages=said)),
        cached(bob.ask(messages=said)),
        cached(ask(site, "bob", TEXT[:50] + "?")),
        cached(ask(site, "bob", TEXT[:50] + "!")),
    ]


def leaves(site: Site) -> list[int]:
    """Leaves in the middle of an answer, as often as it likes, and asks then."""
    for _ in range(2):
        site["bob"].leave(COMPLETIONS, prompt=TEXT[:64] + "?", cache_control={"scope": "org", "ttl": 0})
    return [cached(ask(site, "bob"))]


@pytest.mark.parametrize(
    "probe",
    [
        keeps_nothing,
        forgets_its_own,
        forgets_itself,
        lets_its_own_expire,
        extends_it,
        asks_for_many,
        asks_otherwise,
        leaves,
    ],
)
@pytest.mark.parametrize("own", [False, True], ids=["", "having sent it"])
def test_one_who_asks_more_than_once(town_once: Town, probe: Any, own: bool) -> None:
    """The numbers are those of a text that nobody else has sent: what it is told, and what is computed for it."""
    told: list[Any] = []
    for sent in (True, False):
        site, found = town_once.site(), list[int]()
        if own:
            ask(site, "bob", ttl="1h")
        if sent:
            sends_it(site)
        tokens = site.computed(lambda site=site, found=found: found.extend(probe(site)))
        told.append([found, tokens])
    assert alike(told)


def test_ones_own_copy_is_found(site_once: Site) -> None:
    assert cached(ask(site_once, "bob")) == 0
    assert cached(ask(site_once, "bob")) == MOST
    sends_it(site_once)
    assert cached(ask(site_once, "bob")) == MOST
    assert cached(ask(site_once, "alice")) == MOST


def test_what_two_others_have_sent_is_found(site_once: Site) -> None:
    assert [cached(ask(site_once, who)) for who in ("alice", "dave", "bob")] == [0, 0, MOST]
    assert cached(site_once["mallory"].complete(TEXT, "org")) == 0


def test_one_of_two_others_takes_its_own_back(site_once: Site) -> None:
    """Its expiry, or its forgetting, leaves one other: not enough. What the prober has found meanwhile is its own."""
    controls: tuple[dict[str, Any], ...] = ({}, {"ttl": 0.001})
    for control in controls:
        ask(site_once, "alice")
        answer = ask(site_once, "dave", **control)
        if not control:
            forget(site_once, "dave", answer)
        found = ask(site_once, "bob")
        assert cached(found) == 0
        assert reasons(found) == {"never seen"}
        for who in ("alice", "bob"):
            forget(site_once, who, site_once[who].answers[-1])


def test_each_copy_has_an_expiry_of_its_own(site_once: Site) -> None:
    ask(site_once, "bob", ttl=0.001)
    ask(site_once, "alice")
    assert cached(ask(site_once, "alice")) == MOST, (
        "the shorter life of another's copy is not that of her own"
    )
    found = ask(site_once, "bob", ttl=0.001)
    assert cached(found) == 0, "nor is hers that of his"
    assert reasons(found) == {"expired"}


def test_a_request_that_is_forgotten_is_not_another(site_once: Site) -> None:
    """A user's two requests are two claims on a text: forgetting one leaves the other."""
    first, second = ask(site_once, "bob"), ask(site_once, "bob")
    sends_it(site_once)
    assert forget(site_once, "bob", first) == 0
    assert cached(ask(site_once, "bob", ttl=0.001)) == MOST
    assert forget(site_once, "bob", second) == len(TEXT)
    assert cached(ask(site_once, "bob", ttl=0)) == 0


def test_the_metrics_need_a_permission(site_once: Site) -> None:
    """Whoever reads the slots in use before and after asking learns what `cached_tokens` does not say."""
    answers = {
        who: site_once[who].send("GET", "/metrics") for who in ("alice", "bob", "carol", "boss", "mallory")
    }
    assert {answer.status_code for answer in answers.values()} == {403}
    assert all("slots" not in answer.text for answer in answers.values())
    scraper = site_once["scraper"].send("GET", "/metrics")
    assert scraper.status_code == 200
    assert "ostinato_slots" in scraper.text
    assert "acme" not in scraper.text, "no label tells of a tenant"
    refused = site_once.http.get("/metrics")
    assert refused.status_code == 401
