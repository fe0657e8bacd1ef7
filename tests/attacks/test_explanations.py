"""Explanations as an oracle: a text that others have sent is explained as one that nobody has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attack_fixtures import Site, Town, alike, cached, explanation, reasons, town_of
from ostinato import Engine
from server_fixtures import CHAT, wait_until

TEXT = "The merger with Hooli is signed on Friday at ten, and nobody else may know of it before that day has come."
OTHER = TEXT[:40] + " Whoever asks is told that there is no merger at all, and never was."
OWN = TEXT[:40] + "A" * 40, TEXT[:40] + "B" * 40
"""Two texts of the prober's own, which part from the victim's where they part from each other."""

Deed = Callable[[Site], Any]


def system(scope: str | None = None, **control: Any) -> list[dict[str, Any]]:
    named = {} if scope is None and not control else {"cache_control": {"scope": scope or "user", **control}}
    return [{"role": "system", "content": TEXT, **named}, {"role": "user", "content": "When?"}]


def all_told(site: Site, who: str, *, scope: str | None = None) -> list[Any]:
    """Everything that explanations say to somebody who probes for the text, in the answer and by the request's id."""
    prober = site[who]
    wide = {} if scope is None else {"cache_control": {"type": "ephemeral", "scope": scope}}
    answers = [prober.ask(CHAT, messages=system(scope), explain=True)]
    answers += [prober.complete(text, scope) for text in (OTHER, TEXT, TEXT + " Who knows?")]
    answers += [prober.ask(CHAT, messages=[{"role": "user", "content": TEXT}], explain=True, **wide)]
    told: list[Any] = []
    for answer in answers:
        later = prober.send("GET", f"/v1/requests/{answer.json()['id']}/cache")
        assert later.json() == explanation(answer), "the same in either place"
        told += [site.told(answer), site.told(later)]
    return told


def pair(town: Town, victims: Deed, probe: Deed, *, before: Deed | None = None) -> bool:
    """Whether a probe is told the same with the victims' requests, after those of `before`, and without."""
    told: list[Any] = []
    for sent in (True, False):
        site, found = town.site(), list[Any]()
        if before is not None:
            before(site)
        if sent:
            victims(site)
        tokens = site.computed(lambda site=site, found=found: found.append(probe(site)))
        told.append([found, tokens])
    return alike(told)


def sends_all(who: str, *scopes: str) -> Deed:
    """Somebody sends the text in every way it may."""

    def send(site: Site) -> None:
        for scope in (None, "user", *scopes):
            for text in (TEXT, TEXT + " Who knows?", OTHER):
                site[who].complete(text, scope)
            site[who].ask(CHAT, messages=system(scope))

    return send


@pytest.mark.parametrize("who", ["bob", "carol"])
def test_another_organisation(town: Town, who: str) -> None:
    assert pair(town, sends_all("mallory", "org"), lambda site: all_told(site, who))


@pytest.mark.parametrize("scope", [None, "org"])
def test_a_text_of_ones_own_organisation_to_another(town: Town, scope: str | None) -> None:
    assert pair(town, sends_all("alice", "org"), lambda site: all_told(site, "mallory", scope=scope))


def test_a_colleagues_own_text(town: Town) -> None:
    assert pair(town, sends_all("alice"), lambda site: all_told(site, "bob", scope="org"))


def test_a_colleague_without_the_permission(town: Town) -> None:
    """It may not name the organisation's scope, and does not learn that its text is cached there."""
    assert pair(town, sends_all("alice", "org"), lambda site: all_told(site, "carol"))


def test_another_organisation_without_the_permission_for_everybodys(town: Town) -> None:
    """What is cached for everybody is found by whoever names that scope, which needs a permission."""
    assert pair(town, sends_all("mallory", "org", "public"), lambda site: all_told(site, "alice"))


def test_whoever_may_name_the_scope_is_told_of_it(town: Town) -> None:
    """The hint is given still, to those who could find out by asking."""
    site = town.site()
    sends_all("alice", "org")(site)
    assert reasons(site["bob"].complete(TEXT)) == {"scope"}
    assert "org:acme" in explanation(site["dave"].complete(TEXT))["advice"]


def test_the_hint_of_a_scope_ends_with_the_text(town: Town) -> None:
    def expired(site: Site) -> None:
        site["alice"].complete(TEXT, "org", ttl=0.001)

    def forgotten(site: Site) -> None:
        site["alice"].forget(request=site["alice"].complete(TEXT, "org").json()["id"])

    for deed in (expired, forgotten):
        assert pair(town, deed, lambda site: site.told(site["bob"].complete(TEXT)))


@pytest.mark.parametrize("who", ["bob", "carol"])
def test_released_once_the_organisations_scope_tells_nothing(town_once: Town, who: str) -> None:
    scope = "org" if who == "bob" else None
    assert pair(town_once, sends_all("alice", "org"), lambda site: all_told(site, who, scope=scope))


def test_released_once_the_hint_of_the_scope_is_not_given(town_once: Town) -> None:
    assert pair(town_once, sends_all("alice", "org"), lambda site: all_told(site, "bob"))


@pytest.mark.parametrize("scope", [None, "org"])
def test_what_has_expired_is_its_senders_to_know(town: Town, scope: str | None) -> None:
    def send(site: Site) -> None:
        site["alice"].complete(TEXT, scope, ttl=0.001)
        site["mallory"].complete(TEXT, scope, ttl=0.001)

    assert pair(town, send, lambda site: site.told(site["bob"].complete(TEXT, scope)))
    site = town.site()
    send(site)
    assert reasons(site["alice"].complete(TEXT, scope)) == {"expired"}


def test_what_was_evicted_is_its_senders_to_know(tiny_model: Path) -> None:
    """In a pool that its own requests fill, the prober is told of none that others' pushed out."""
    with Engine(str(tiny_model), dtype="float32", kv_tokens=768) as engine, town_of(engine) as town:

        def pushed_out(site: Site) -> None:
            evicted = engine.stats().evicted_blocks
            for number in range(8):
                site["dave"].complete(f"{number}" * 300)
            assert engine.stats().evicted_blocks > evicted + 48

        def send(site: Site) -> None:
            site["alice"].complete(TEXT)
            site["alice"].complete(TEXT, "org")
            pushed_out(site)

        for scope in (None, "org"):
            assert pair(town, send, lambda site, scope=scope: site.told(site["bob"].complete(TEXT, scope)))
            site = town.site()
            send(site)
            assert reasons(site["alice"].complete(TEXT, scope)) == {"evicted"}
            # What is remembered goes with what is forgotten.
            pushed_out(site)
            site["alice"].forget(user="alice")
            assert reasons(site["alice"].complete(TEXT, scope)) == {"never seen"}


# -- what the prober has sent itself --------------------------------------------------------------------------


def test_a_copy_of_ones_own_does_not_tell_of_another(town_once: Town) -> None:
    """The prober has sent the text itself, before the victim or after; what parts from it is explained the same."""

    def probe(site: Site) -> Any:
        return [site.told(site["bob"].complete(text, "org")) for text in (TEXT[:50] + "x" + TEXT[50:], OTHER)]

    for control in ({}, {"ttl": "1h"}, {"ttl": 0.001}, {"ttl": 0}):

        def own(site: Site, control: dict[str, Any] = control) -> None:
            site["bob"].complete(TEXT, "org", **control)

        def then_probe(site: Site, own: Deed = own) -> Any:
            own(site)
            return probe(site)

        assert pair(town_once, sends_all("alice", "org"), probe, before=own)
        assert pair(town_once, sends_all("alice", "org"), then_probe)


@pytest.mark.parametrize("first", [0, 1])
def test_which_of_ones_own_texts_is_compared_does_not_tell(town_once: Town, first: int) -> None:
    """Of two earlier texts the explanation quotes one: neither the last that somebody has sent, nor the first."""

    def own(site: Site) -> None:
        for text in (OWN[first], OWN[1 - first]):
            site["bob"].complete(text, "org")

    def probe(site: Site) -> Any:
        return [site.told(site["bob"].complete(TEXT[:at] + "C" * 40, "org")) for at in (40, 32, 48)]

    def then_probe(site: Site) -> Any:
        own(site)
        return probe(site)

    def send(site: Site) -> None:
        site["alice"].complete(OWN[0], "org")

    assert pair(town_once, send, probe, before=own)
    assert pair(town_once, send, then_probe)


def test_what_one_has_forgotten_is_not_remembered_for_another(town_once: Town) -> None:
    """The victim's copy keeps the block, but not that the prober's had expired."""

    def probe(site: Site) -> Any:
        bob = site["bob"]
        bob.complete(TEXT, "org", ttl=0.001)
        told = [bob.forget(user="bob"), site.told(bob.complete(TEXT, "org", ttl=0.001))]
        return [*told, bob.forget(request=bob.answers[-1].json()["id"]), site.told(bob.complete(TEXT, "org"))]

    assert pair(town_once, sends_all("alice", "org"), probe)


# -- whose explanations there are -----------------------------------------------------------------------------


def test_explanations_of_others_might_as_well_not_exist(site: Site) -> None:
    id = site["alice"].complete(TEXT).json()["id"]
    for who in ("bob", "boss", "mallory"):
        told = [
            site.told(site[who].send("GET", f"/v1/requests/{each}/cache"))
            for each in (id, "cmpl-" + "0" * 32)
        ]
        assert told[0][0] == 404
        assert told[0] == told[1]


def test_explanations_go_with_what_they_quote(site: Site) -> None:
    alice = site["alice"]
    id = alice.complete(TEXT).json()["id"]
    alice.forget(user="alice")
    assert alice.send("GET", f"/v1/requests/{id}/cache").status_code == 404
    assert cached(alice.complete(TEXT)) == 0


def test_what_leaves_in_the_middle_is_not_told_either(town: Town) -> None:
    def send(site: Site) -> None:
        site["alice"].leave(messages=system())
        site["mallory"].leave(messages=system())
        wait_until(lambda: site.engine.stats().running == 0)

    assert pair(town, send, lambda site: all_told(site, "bob"))
