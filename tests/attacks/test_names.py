"""Names that others take: a prompt over a name means what it meant before, whatever anybody registers under it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from attack_fixtures import MESSAGES, Person, Site
from server_fixtures import CHAT

OPERATORS = "This is the operator's."
HIJACKED = "This is somebody else's, who would like to have every prompt begin so."
OWN = "My own, and nobody else's."
PUBLISHED = "What the organisation has agreed on, as it is published to all of it."


def pml(name: str, text: str) -> str:
    return f'<schema name="{name}"><module name="m">{text}</module></schema>'


def register(site: Site, who: str, name: str, text: str, **fields: Any) -> str:
    answer = site[who].send("POST", "/v1/schemas", {"pml": pml(name, text)} | fields)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def uses(person: Person, reference: str) -> str | None:
    """Which text a prompt over the schema of a name or an id has."""
    prompt = f'<prompt schema="{reference}"><m/>?</prompt>'
    body = {"model": person.site.engine.model_name, "max_tokens": 1, "temperature": 0, "explain": True}
    answer = person.send("POST", CHAT, body | {"pml": prompt})
    if answer.status_code != 200:
        assert answer.status_code == 400
        assert "There is no schema" in answer.text
        return None
    spans = answer.json()["ostinato"]["cache"]["spans"]
    size = sum(span["tokens"] for span in spans if span["kind"] == "document")
    return next(text for text in (OPERATORS, HIJACKED, OWN, PUBLISHED) if len(text) == size)


HIJACKERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a colleague without permissions": ("carol", {"readers": ["user:boss", "user:bob"]}),
    "a colleague who publishes": ("alice", {"scope": "org"}),
    "a colleague who shares with some": ("alice", {"scope": "org", "readers": ["user:boss", "user:bob"]}),
    "another organisation": ("mallory", {"scope": "public"}),
    "another organisation, to some": ("mallory", {"readers": ["user:boss", "user:bob"]}),
}


@pytest.fixture
def operators(site: Site) -> Iterator[Callable[[], object]]:
    """Gives a schema the name `helpdesk`, as the operator does."""
    yield lambda: site.engine.register(pml("helpdesk", OPERATORS))
    site.engine.unregister("helpdesk")


@pytest.mark.parametrize("how", HIJACKERS)
def test_a_name_of_the_operators_is_the_operators(
    site: Site, operators: Callable[[], object], how: str
) -> None:
    """Whether somebody else has it already, or tries to."""
    who, fields = HIJACKERS[how]
    register(site, who, "helpdesk", HIJACKED, **fields)
    operators()
    for person in site.people.values():
        assert uses(person, "helpdesk") == OPERATORS, person.name
        assert person.send("GET", "/v1/schemas/helpdesk").json()["id"] is None
    refused = site["dave"].send("POST", "/v1/schemas", {"pml": pml("helpdesk", HIJACKED)} | fields)
    assert refused.status_code in (403, 409)


@pytest.mark.parametrize("how", HIJACKERS)
def test_a_name_of_ones_own_stays_ones_own(site: Site, how: str) -> None:
    who, fields = HIJACKERS[how]
    own = register(site, "boss", "plan", OWN)
    id = register(site, who, "plan", HIJACKED, **fields)
    assert uses(site["boss"], "plan") == OWN
    assert site["boss"].send("GET", "/v1/schemas/plan").json()["id"] == own
    readable = fields.get("scope") == "public" or who in ("carol", "alice")
    assert uses(site["boss"], id) == (HIJACKED if readable else None), "what is shared is reached by its id"


@pytest.mark.parametrize("how", HIJACKERS)
def test_a_name_that_means_nothing_goes_on_to_unless_the_organisation_publishes_it(
    site: Site, how: str
) -> None:
    who, fields = HIJACKERS[how]
    register(site, who, "plan", HIJACKED, **fields)
    for name in ("boss", "bob", "dave"):
        named = name in ("boss", "bob") and how == "a colleague who shares with some"
        published = how == "a colleague who publishes" or named
        assert uses(site[name], "plan") == (HIJACKED if published else None)
        listed = [each["name"] for each in site[name].send("GET", "/v1/schemas").json()["data"]]
        known = site[name].send(
            "POST", CHAT, {"model": site.engine.model_name, "pml": '<prompt schema="plam"/>'}
        )
        assert ("plan" in known.text) == published, "an error names no name that means nothing"
        assert published <= ("plan" in listed)
    assert uses(site["mallory"], "plan") == (HIJACKED if who == "mallory" else None)


def test_who_publishes_first_is_not_replaced(site: Site) -> None:
    register(site, "alice", "plan", PUBLISHED, scope="org")
    register(site, "dave", "plan", HIJACKED, scope="org")
    assert uses(site["bob"], "plan") == PUBLISHED
    assert uses(site["dave"], "plan") == HIJACKED, "his own"


def test_what_needs_more_comes_first(site: Site) -> None:
    """Whoever may publish to everyone is believed before who may publish to the organisation."""
    site.join("chief", "acme", "publish:public")
    register(site, "dave", "plan", HIJACKED, scope="org")
    register(site, "chief", "plan", PUBLISHED, scope="public")
    assert uses(site["bob"], "plan") == PUBLISHED
    assert uses(site["mallory"], "plan") is None


def test_a_schema_cannot_be_given_the_name_of_an_id(site: Site) -> None:
    id = register(site, "alice", "plan", PUBLISHED, scope="org")
    answer = site["carol"].send("POST", "/v1/schemas", {"pml": pml(id, HIJACKED)})
    assert answer.status_code == 400
    assert uses(site["bob"], id) == PUBLISHED
    assert uses(site["mallory"], id) is None


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_documents_are_named_by_the_same_rules(site: Site, path: str) -> None:
    def text(who: str, reference: str) -> str | None:
        file = {"type": "document", "source": {"type": "file", "file_id": reference}}
        said = [{"role": "user", "content": [file, {"type": "text", "text": "?"}]}]
        body = {"model": site.engine.model_name, "max_tokens": 1, "messages": said}
        answer, read = site[who].send("POST", path, body), site[who].send("GET", f"/v1/documents/{reference}")
        assert answer.status_code == read.status_code, "the same is meant wherever it is named"
        return read.json()["text"] if read.status_code == 200 else None

    ids = {
        who: site[who]
        .send("POST", "/v1/documents", {"name": "plan", "text": HIJACKED, **fields})
        .json()["id"]
        for who, fields in (("carol", {"readers": ["user:bob"]}), ("mallory", {"scope": "public"}))
    }
    assert text("bob", "plan") is None
    site["alice"].send("POST", "/v1/documents", {"name": "plan", "text": PUBLISHED, "scope": "org"})
    assert text("bob", "plan") == PUBLISHED
    site["bob"].send("POST", "/v1/documents", {"name": "plan", "text": OWN})
    assert text("bob", "plan") == OWN
    assert [text("bob", id) for id in ids.values()] == [HIJACKED, HIJACKED]
    assert text("boss", ids["carol"]) is None
