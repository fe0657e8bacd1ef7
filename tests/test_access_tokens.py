"""Tokens of issuers: real keys, real signatures, a real server for the key sets, and all kinds of forgery."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from access_fixtures import BAD_NAMES, Clock
from ostinato.access.access import Access
from ostinato.access.errors import NotFoundError, UnauthenticatedError
from ostinato.access.jwks import (
    ALGORITHMS,
    MAX_AGE,
    MAX_BYTES,
    MAX_STALE,
    PAUSE,
    JwksError,
    JwksUrl,
    find,
    parse_jwks,
)
from ostinato.access.principal import LOCAL, PERMISSIONS, Principal
from ostinato.access.tokens import MAX_TOKEN, Issuer
from ostinato.errors import InvalidRequestError
from token_fixtures import AUDIENCE, ISSUER, Json, claims, key, public, token


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def assembled(header: Json, payload: Json, sign: Callable[[bytes], bytes] = lambda _: b"") -> str:
    """A token that no library would make."""
    text = f"{b64(json.dumps(header).encode())}.{b64(json.dumps(payload).encode())}"
    return f"{text}.{b64(sign(text.encode()))}"


@pytest.fixture
def jwks(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [public("rsa"), public("p256"), public("ed")]}))
    return path


@pytest.fixture
def access(tmp_path: Path, jwks: Path) -> Iterator[Access]:
    with Access(tmp_path / "access.db") as access:
        access.issuers.add(Issuer(ISSUER, AUDIENCE, str(jwks)))
        yield access


def ask(access: Access, token: str) -> Principal:
    return access.authenticate(f"Bearer {token}")


def refused(access: Access, token: str, says: str) -> None:
    with pytest.raises(UnauthenticatedError, match=says) as caught:
        ask(access, token)
    assert caught.value.code == "invalid_token"
    entry = access.audit.read()[-1]
    assert entry.action == "refused"
    payload = token.split(".")[1]
    assert not payload or payload not in str(entry)


def test_a_token_says_who_asks(access: Access) -> None:
    assert access.required
    expected = Principal("acme", "alice", groups=frozenset({"finance"}), credential=ISSUER)
    assert ask(access, token()) == expected
    assert ask(access, token(aud=["other", AUDIENCE])) == expected
    assert ask(access, token(kid=None)) == expected  # the only key for RS256
    assert ask(access, token(nbf=None, iat=None)) == expected
    assert ask(access, token(groups=None)).groups == frozenset()
    assert ask(access, token(groups="finance")).groups == {"finance"}
    access.groups.add("acme", "alice", "hr")
    assert ask(access, token()).groups == {"finance", "hr"}
    access.groups.remove("acme", "alice", "hr")
    assert ask(access, token()).groups == {"finance"}
    with pytest.raises(UnauthenticatedError):
        access.authenticate(None)


@pytest.mark.parametrize(
    ("signer", "algorithm"),
    [("rsa", "RS256"), ("rsa", "RS512"), ("rsa", "PS256"), ("p256", "ES256"), ("ed", "EdDSA")],
)
def test_algorithms(access: Access, signer: str, algorithm: str) -> None:
    assert ask(access, token(signer, algorithm)).user == "alice"


def test_only_asymmetric_algorithms_are_there() -> None:
    assert not [name for name in ALGORITHMS if name.startswith("HS") or name.lower() == "none"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"exp": 1_000_000_000}, "expired"),
        ({"exp": None}, "exp"),
        ({"exp": "soon"}, "does not hold"),
        ({"exp": [1]}, "does not hold"),
        ({"exp": float("inf")}, "does not hold"),
        ({"nbf": 4_000_000_000}, "not valid yet"),
        ({"iat": 4_000_000_000}, "not valid yet"),
        ({"aud": "other"}, "another server"),
        ({"aud": None}, "aud"),
        ({"aud": []}, "aud"),
        ({"aud": {"ostinato": 1}}, "another server"),
        ({"aud": "OSTINATO"}, "another server"),
        ({"iss": "https://login.evil.com"}, "issuer"),
        ({"iss": ISSUER + "/"}, "issuer"),
        ({"iss": None}, "issuer"),
        ({"iss": "x' OR '1'='1"}, "issuer"),
        ({"iss": "%"}, "issuer"),
        ({"iss": "\ud800"}, "issuer"),
        ({"sub": None}, "sub"),
        ({"sub": ""}, "claim sub"),
        ({"org": None}, "claim org"),
        ({"org": ["acme"]}, "claim org"),
        ({"org": {"a": 1}}, "claim org"),
        ({"groups": {"finance": True}}, "claim groups"),
        ({"groups": ["finance", 1]}, "claim groups"),
        ({"groups": ["finance", ""]}, "claim groups"),
    ],
)
def test_claims_that_do_not_hold(access: Access, changed: Json, says: str) -> None:
    payload = json.dumps(claims(**changed)).encode()
    made = jwt.api_jws.encode(payload, key("rsa"), "RS256", {"kid": "rsa"})
    refused(access, made, says)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_cannot_be(access: Access, name: str) -> None:
    for claim, value in (("sub", name), ("org", name), ("groups", [name])):
        refused(access, token(**{claim: value}), f"claim {claim}")


def test_a_little_of_clock_difference_is_forgiven(access: Access) -> None:
    now = int(time.time())
    assert ask(access, token(exp=now - 5, iat=now + 5, nbf=now + 5))
    refused(access, token(exp=now - 40), "expired")


def test_forged(access: Access) -> None:
    good = token()
    header, payload, signature = good.split(".")
    other = b64(json.dumps(claims(sub="root", permissions=["admin"])).encode())
    refused(access, f"{header}.{other}.{signature}", "does not hold")
    refused(access, f"{header}.{payload}.{signature[:-8]}AAAAAAAA", "does not hold")
    refused(access, f"{header}.{payload}.", "does not hold")
    refused(access, token("rsa-other", kid="rsa"), "does not hold")
    refused(access, token("p256-other", "ES256", kid="p256"), "does not hold")


def test_no_algorithm(access: Access) -> None:
    for name in ("none", "None", "NONE", "nOnE", "", None, 0, ["RS256"], {"RS256": 1}):
        refused(access, assembled({"alg": name, "kid": "rsa"}, claims()), "algorithm|malformed")
    refused(access, jwt.encode(claims(), None, "none"), "algorithm")


def test_signed_with_the_public_key_as_a_secret(access: Access) -> None:
    pem = (
        key("rsa")
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    for secret in (pem, pem.strip(), b"", json.dumps(public("rsa")).encode()):

        def sign(text: bytes, secret: bytes = secret) -> bytes:
            return hmac.new(secret, text, hashlib.sha256).digest()

        refused(access, assembled({"alg": "HS256", "kid": "rsa"}, claims(), sign), "algorithm")
        refused(access, assembled({"alg": "RS256", "kid": "rsa"}, claims(), sign), "does not hold")


def test_a_key_of_another_kind(access: Access) -> None:
    # The algorithm of one key with the id of another.
    refused(access, token("p256", "ES256", kid="rsa"), "not signed by a key")
    refused(access, token("rsa", kid="p256"), "not signed by a key")
    refused(access, token("k1", "ES256K", kid="p256"), "algorithm")
    refused(access, token("p384", "ES384", kid="p256"), "not signed by a key")


@pytest.mark.parametrize(
    "kid",
    [
        "unknown",
        "",
        " rsa",
        "RSA",
        "../../../dev/null",
        "/etc/passwd",
        "rsa' OR '1'='1",
        "https://evil.com/jwks.json",
        "rsa\0",
        "\ud800",
        "x" * 5_000,
    ],
)
def test_key_ids(access: Access, kid: str) -> None:
    refused(access, jwt.encode(claims(), key("rsa-other"), "RS256", {"kid": kid}), "not signed by a key")


def test_a_token_brings_no_key_with_it(access: Access) -> None:
    evil = public("rsa-other")
    for header in (
        {"jwk": evil},
        {"jku": "https://evil.com/jwks.json"},
        {"x5u": "https://evil.com/x"},
        {"x5c": ["AAAA"]},
    ):
        refused(access, token("rsa-other", header=header), "not signed by a key")
        refused(access, token("rsa-other", kid="rsa", header=header), "does not hold")


def test_odd_headers(access: Access) -> None:
    def sign(text: bytes) -> bytes:
        return jwt.get_algorithm_by_name("RS256").sign(text, key("rsa"))

    for extra in (
        {"crit": ["b64"], "b64": True},
        {"crit": ["x"], "x": 1},
        {"crit": []},
        {"kid": 1},
        {"kid": ["rsa"]},
    ):
        refused(access, assembled({"alg": "RS256", "kid": "rsa"} | extra, claims(), sign), "header|malformed")
    assert ask(access, assembled({"alg": "RS256", "kid": "rsa"}, claims(), sign)).user == "alice"


def test_malformed(access: Access) -> None:
    deep = b64(b"[" * 8_000)
    for text in (
        "a.b.c",
        "..",
        f"{deep}.{deep}.",
        token() + "x" * MAX_TOKEN,
        token().replace(".", "..", 1)[:-1] + ".",
    ):
        with pytest.raises(UnauthenticatedError):
            ask(access, text)
    header = b64(json.dumps({"alg": "RS256", "kid": "rsa"}).encode())
    for payload in (b"[" * 8_000, b"[]", b"1", b"null", b"{", b"\xff", b'{"iss": NaN}', b""):
        refused(access, f"{header}.{b64(payload)}.AAAA", "malformed|issuer")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
claim_names = ("iss", "aud", "sub", "exp", "nbf", "iat", "jti", "org", "groups", "permissions")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changed=st.dictionaries(st.sampled_from(claim_names), json_values, max_size=4),
    header=st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "b64"]), json_values, max_size=2),
)
def test_whatever_a_signed_token_holds(access: Access, changed: Json, header: Json) -> None:
    """It is somebody, or refused: there is no third."""

    def sign(text: bytes) -> bytes:
        return jwt.get_algorithm_by_name("RS256").sign(text, key("rsa"))

    made = assembled({"alg": "RS256", "kid": "rsa"} | header, claims() | changed, sign)
    try:
        principal = ask(access, made)
    except UnauthenticatedError:
        return
    assert principal.credential == ISSUER
    assert not principal.permissions


def test_an_issuer_gives_what_its_entry_lists(access: Access, jwks: Path) -> None:
    everything = list(PERMISSIONS)
    assert ask(access, token(permissions=everything)).permissions == frozenset()
    limited = Issuer(ISSUER, AUDIENCE, str(jwks), permissions=frozenset({"publish:org"}))
    access.issuers.add(limited)
    assert ask(access, token(permissions=[*everything, "other"])).permissions == {"publish:org"}
    assert ask(access, token(permissions="openid publish:org admin")).permissions == {"publish:org"}
    assert ask(access, token()).permissions == frozenset()
    refused(access, token(permissions=[["admin"]]), "claim permissions")


def test_names_of_claims_and_a_fixed_organisation(access: Access, jwks: Path) -> None:
    fixed = Issuer(
        ISSUER, AUDIENCE, str(jwks), "acme", user_claim="email", groups_claim="https://acme.com/roles"
    )
    access.issuers.add(fixed)
    made = token(org="evil", email="a@acme.com", **{"https://acme.com/roles": ["hr"]})
    assert ask(access, made) == Principal("acme", "a@acme.com", groups=frozenset({"hr"}), credential=ISSUER)
    refused(access, token(), "email")
    assert access.issuers.all() == [fixed]


def test_issuers_do_not_speak_for_each_other(access: Access, tmp_path: Path) -> None:
    evil = tmp_path / "evil.json"
    evil.write_text(json.dumps({"keys": [public("rsa-other", "rsa")]}))
    access.issuers.add(Issuer("https://login.evil.com", AUDIENCE, str(evil), "evil"))
    assert ask(access, token("rsa-other", kid="rsa", iss="https://login.evil.com", org="acme")).org == "evil"
    refused(access, token("rsa-other", kid="rsa"), "does not hold")


def test_a_removed_issuer(access: Access, tmp_path: Path) -> None:
    with Access(tmp_path / "access.db") as other:
        other.issuers.remove(ISSUER)
    refused(access, token(), "issuer")
    assert access.issuers.all() == []
    with pytest.raises(NotFoundError, match="issuers list"):
        access.issuers.remove(ISSUER)
    with Access(tmp_path / "access.db") as later:
        assert later.required


def test_the_same_user_by_key_and_token(access: Access) -> None:
    _, secret = access.keys.create("acme", "alice", ["hr"])
    by_key, by_token = ask(access, secret), ask(access, token())
    assert (by_key.org, by_key.user) == (by_token.org, by_token.user)
    assert by_key.scope("user") == by_token.scope("user")
    assert by_token.groups == {"finance", "hr"}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("http://login.acme.com/jwks.json", "https"),
        ("http://127.0.0.1.evil.com/jwks.json", "https"),
        ("http://localhost@evil.com/jwks.json", "URL"),
        ("https://user:secret@acme.com/jwks", "URL"),
        ("ftp://127.0.0.1/jwks", "https"),
        ("file:///etc/passwd", "URL"),
        ("https://", "URL"),
        ("https://[::1/jwks", "URL"),
        ("https://acme.com:port/jwks", "URL"),
        ("https://acme.com/a b", "URL"),
        ("https://acme.com/\r\nX: y", "URL"),
        ("no-such-file.json", "cannot be read"),
        ("/", "cannot be read"),
    ],
)
def test_sources_that_are_refused(access: Access, source: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        access.issuers.add(Issuer("other", AUDIENCE, source))
    assert len(access.issuers.all()) == 1


def test_sets_that_are_none(access: Access, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ("", "{}", "[]", '{"keys": 1}', "[" * 100_000, " " * (MAX_BYTES + 1)):
        path.write_text(text)
        with pytest.raises(InvalidRequestError, match="key set"):
            access.issuers.add(Issuer("other", AUDIENCE, str(path)))
    path.write_text(json.dumps({"keys": [public("weak")]}))
    with pytest.raises(InvalidRequestError, match="no public key"):
        access.issuers.add(Issuer("other", AUDIENCE, str(path)))
    for changed in ({"audience": ""}, {"org": "a\nb"}, {"user_claim": ""}):
        with pytest.raises(InvalidRequestError):
            access.issuers.add(Issuer(**({"issuer": "o", "audience": "a", "jwks": str(path)} | changed)))


def test_keys_of_a_set_that_are_left_out() -> None:
    entries = [
        public("rsa", use="enc"),
        public("rsa", key_ops=["encrypt"]),
        public("rsa", key_ops=1),
        public("rsa", alg="RSA-OAEP"),
        public("rsa", alg="HS256"),
        public("weak"),
        public("k1"),
        {"kty": "oct", "k": "AAAA", "kid": "rsa", "alg": "HS256"},
        {"kty": "RSA", "n": "!", "e": "AQAB"},
        {"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"},
        {"kty": ["RSA"]},
        {},
        None,
        "rsa",
    ]
    assert parse_jwks(json.dumps({"keys": entries}).encode()) == []
    kept = parse_jwks(
        json.dumps({"keys": [*entries, public("rsa", alg="PS256"), public("p384", None)]}).encode()
    )
    assert [(each.id, set(each.algorithms)) for each in kept] == [("rsa", {"PS256"}), (None, {"ES384"})]


def test_a_file_that_changes(access: Access, jwks: Path) -> None:
    refused(access, token("rsa-new"), "not signed by a key")
    replacement = jwks.with_name("new.json")
    replacement.write_text(json.dumps({"keys": [public("rsa-new")]}))
    os.replace(replacement, jwks)
    assert ask(access, token("rsa-new")).user == "alice"
    refused(access, token("rsa"), "not signed by a key")
    jwks.unlink()
    refused(access, token("rsa-new"), "cannot be had")


class Publisher:
    """A server of a key set, which counts how often it is asked."""

    def __init__(self) -> None:
        self.body = b""
        self.status = 200
        self.asked = 0
        self.url = ""

    def publish(self, *names: str) -> None:
        self.body = json.dumps({"keys": [public(name) for name in names]}).encode()


@contextmanager
def publishing() -> Iterator[Publisher]:
    publisher = Publisher()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            publisher.asked += 1
            self.send_response(publisher.status)
            self.send_header("Location", f"{publisher.url}?again")
            self.send_header("Content-Length", str(len(publisher.body)))
            self.end_headers()
            self.wfile.write(publisher.body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    publisher.url = f"http://127.0.0.1:{server.server_port}/jwks.json"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield publisher
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with publishing() as publisher:
        publisher.publish("rsa")
        yield publisher


def test_keys_from_a_url(access: Access, publisher: Publisher) -> None:
    access.issuers.add(Issuer(ISSUER, AUDIENCE, publisher.url))
    assert publisher.asked == 0
    for _ in range(5):
        assert ask(access, token()).user == "alice"
    assert publisher.asked == 1
    # The issuer signs with a new key: it is fetched when first seen.
    publisher.publish("rsa", "rsa-new")
    assert ask(access, token("rsa-new")).user == "alice"
    assert ask(access, token()).user == "alice"
    assert publisher.asked == 2
    # Made-up key ids do not make this server a weapon against the issuer.
    for number in range(50):
        with pytest.raises(UnauthenticatedError, match="not signed by a key"):
            ask(access, token("rsa-other", kid=f"made-up-{number}"))
    assert publisher.asked == 2


def test_when_keys_are_fetched(publisher: Publisher) -> None:
    clock = Clock()
    keys = JwksUrl(publisher.url, clock=clock)
    assert find(keys, "rsa", "RS256")
    publisher.publish("rsa-new")
    clock.now += MAX_AGE - 1
    assert find(keys, "rsa", "RS256")
    assert publisher.asked == 1
    clock.now += 2
    assert find(keys, "rsa", "RS256") is None  # taken out: not trusted for longer than this
    assert find(keys, "rsa-new", "RS256")
    assert publisher.asked == 2
    publisher.publish("rsa")
    assert find(keys, "rsa", "RS256")
    publisher.publish("p256")
    assert find(keys, "p256", "ES256") is None
    assert publisher.asked == 3
    clock.now += PAUSE
    assert find(keys, "p256", "ES256")
    assert find(keys, None, "ES256")
    assert publisher.asked == 4


def test_a_publisher_that_fails(publisher: Publisher) -> None:
    clock = Clock()
    keys = JwksUrl(publisher.url, clock=clock)
    publisher.status = 500
    for _ in range(3):
        with pytest.raises(JwksError, match="500"):
            find(keys, "rsa", "RS256")
    assert publisher.asked == 1
    clock.now += PAUSE
    publisher.status = 200
    assert find(keys, "rsa", "RS256")
    publisher.status = 500
    clock.now += MAX_AGE + 1
    for _ in range(3):
        assert find(keys, "rsa", "RS256")  # as it was; an outage there is none here
    assert publisher.asked == 3
    clock.now += MAX_STALE
    with pytest.raises(JwksError, match="500"):
        find(keys, "rsa", "RS256")


def test_answers_that_are_no_set(publisher: Publisher) -> None:
    for status, body, says in (
        (302, b"", "302"),
        (200, b" " * (MAX_BYTES + 10), "larger"),
        (200, b"<html>", "JSON Web Key Set"),
    ):
        publisher.status, publisher.body, publisher.asked = status, body, 0
        with pytest.raises(JwksError, match=says):
            find(JwksUrl(publisher.url), "rsa", "RS256")
        assert publisher.asked == 1
    with publishing() as gone:
        url = gone.url
    with pytest.raises(JwksError, match="cannot be fetched"):
        find(JwksUrl(url), "rsa", "RS256")


def test_many_threads_fetch_once(publisher: Publisher) -> None:
    keys = JwksUrl(publisher.url)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(find(keys, "rsa", "RS256"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([each for each in found if each]) == 8
    assert publisher.asked == 1


def test_without_issuers_and_keys_tokens_are_not_looked_at(tmp_path: Path) -> None:
    with Access(tmp_path / "other.db") as access:
        assert ask(access, token()) == LOCAL
