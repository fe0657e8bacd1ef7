"""The public keys of a token issuer: a JSON Web Key Set in a file or at a URL."""

from __future__ import annotations

import ipaddress
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa

from ostinato.access.fetch import Fetch, FetchError
from ostinato.access.names import shown
from ostinato.errors import InvalidRequestError, OstinatoError

log = logging.getLogger(__name__)

PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | ed448.Ed448PublicKey

RSA_ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
ALGORITHMS = RSA_ALGORITHMS | frozenset(CURVES.values()) | {"EdDSA"}
"""Signatures that only the issuer can make. With HS256 whoever can check a token can make one; `none` anybody can."""

MIN_RSA_BITS = 2048
MAX_BYTES = 1 << 20
TIMEOUT = 5.0
"""Seconds for all of a fetch."""
MAX_AGE = 300.0
"""Seconds that a set from a URL is used before it is fetched again: a key that was taken out ends with them."""
MAX_STALE = 3600.0
"""Seconds that it is used at most while it cannot be fetched."""
PAUSE = 30.0
"""Seconds between fetches that a token of an unknown key can bring about, and after one that failed."""


class JwksError(OstinatoError):
    """The key set cannot be had, or is none."""


@dataclass(frozen=True)
class VerifyingKey:
    """A public key and the algorithms it may be used with: a key never chooses by what a token says of itself."""

    id: str | None
    key: PublicKey
    algorithms: frozenset[str]


class Jwks(Protocol):
    """The keys of one source."""

    def refresh(self, key_id: str | None, algorithm: str) -> Future[None] | None:
        """Begin to fetch what must be fetched to tell about a key, or join those who wait for it; None if nothing."""
        ...

    def known(self, key_id: str | None, algorithm: str) -> VerifyingKey | None:
        """The key of an id for an algorithm; without an id, the only one for it. Of what is there: this never waits."""
        ...


class JwksFile:
    """A set in a file, read again when the file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[tuple[int, int, int], list[VerifyingKey]] | None = None

    def refresh(self, key_id: str | None, algorithm: str) -> None:
        """None: a file is at hand."""

    def known(self, key_id: str | None, algorithm: str) -> VerifyingKey | None:
        return pick(self.keys(), key_id, algorithm)

    def keys(self) -> list[VerifyingKey]:
        """The keys that are in it now."""
        try:
            status = self._path.stat()
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._read is None or self._read[0] != stamp:
                with self._path.open("rb") as file:
                    self._read = (stamp, parse_jwks(file.read(MAX_BYTES + 1)))
            return self._read[1]
        except OSError as error:
            raise JwksError(f"{self._path} cannot be read: {error.strerror}.") from None


class JwksUrl:
    """A set at a URL, kept for some minutes; fetched early, but not often, for a key that is not in it.

    At most one fetch runs at a time, and nobody need wait for it: `known` answers with what is there.
    """

    def __init__(
        self, url: str, *, clock: Callable[[], float] = time.monotonic, timeout: float = TIMEOUT
    ) -> None:
        self._url = url
        self._clock = clock
        self._timeout = timeout
        self._lock = threading.Lock()
        self._keys: list[VerifyingKey] | None = None
        self._fetched = 0.0
        self._not_before = float("-inf")
        self._problem = f"The key set {url} has not been fetched yet."
        self._coming: Future[None] | None = None

    def refresh(self, key_id: str | None, algorithm: str) -> Future[None] | None:
        with self._lock:
            now = self._clock()
            old = self._keys is None or now - self._fetched > MAX_AGE
            unknown = not old and key_id is not None and pick(self._keys or [], key_id, algorithm) is None
            if not (old or unknown):
                return None
            if self._coming is not None or now < self._not_before:
                return self._coming
            if unknown:
                self._not_before = now + PAUSE
            fetch = Fetch(self._url, most=MAX_BYTES, seconds=self._timeout)
            coming = self._coming = Future()
        fetch.done.add_done_callback(lambda done: self._arrived(done, coming))
        return coming

    def known(self, key_id: str | None, algorithm: str) -> VerifyingKey | None:
        with self._lock:
            if self._keys is None or self._clock() - self._fetched > MAX_STALE:
                raise JwksError(self._problem)
            return pick(self._keys, key_id, algorithm)

    def _arrived(self, done: Future[bytes], coming: Future[None]) -> None:
        problem, keys = f"The key set {self._url} cannot be read.", None
        try:
            keys = parse_jwks(done.result())
        except FetchError as error:
            problem = f"The key set {error}"
        except JwksError as error:
            problem = str(error)
        finally:  # those who wait are told, whatever it was
            with self._lock:
                now = self._clock()
                if keys is None:
                    self._not_before, self._problem = now + PAUSE, problem
                    log.warning("%s", problem)
                else:
                    self._keys, self._fetched = keys, now
                self._coming = None
            coming.set_result(None)


def find(keys: Jwks, key_id: str | None, algorithm: str) -> VerifyingKey | None:
    """The key of an id, fetched if need be, which takes seconds at worst."""
    coming = keys.refresh(key_id, algorithm)
    if coming is not None:
        wait((coming,))
    return keys.known(key_id, algorithm)


def check_source(source: str) -> str:
    """Where a set is, if that can be: an https URL (http on this machine alone), or a file, as an absolute path."""
    if "://" not in source:
        path = Path(source).expanduser().absolute()
        try:
            usable = JwksFile(path).keys()
        except JwksError as error:
            raise InvalidRequestError(f"--jwks {source}: {error}", param="jwks") from None
        if not usable:
            raise InvalidRequestError(f"{path} has no public key to check tokens with.", param="jwks")
        return str(path)
    try:
        url = urlsplit(source)
        host, _ = url.hostname or "", url.port
    except ValueError as error:
        raise InvalidRequestError(f"{shown(source)} is not a URL: {error}.", param="jwks") from None
    if not host or not source.isprintable() or " " in source or url.username is not None:
        raise InvalidRequestError(
            f"{shown(source)} is not a URL of a key set: write https://HOST/PATH.", param="jwks"
        )
    if url.scheme != "https" and not (url.scheme == "http" and _is_loopback(host)):
        raise InvalidRequestError(
            f"Keys fetched from {shown(source)} could be changed on the way. Use https.", param="jwks"
        )
    return source


def open_jwks(source: str) -> Jwks:
    """The set at a URL or path."""
    return JwksUrl(source) if "://" in source else JwksFile(Path(source))


def parse_jwks(data: bytes) -> list[VerifyingKey]:
    """The public keys of a set that tokens may be checked with; others (of encryption, symmetric, weak) are left out."""
    if len(data) > MAX_BYTES:
        raise JwksError(f"The key set is larger than {MAX_BYTES:,} bytes.")
    try:
        document: Any = json.loads(data)
        entries: list[Any] = document["keys"]
        return [key for entry in entries if (key := _parse_key(entry)) is not None]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise JwksError('The key set is not a JSON Web Key Set: {"keys": [...]} in JSON.') from None


def pick(keys: list[VerifyingKey], key_id: str | None, algorithm: str) -> VerifyingKey | None:
    """The key of an id that fits an algorithm; without an id, the one that fits, if there is one alone."""
    fitting = [key for key in keys if algorithm in key.algorithms and key_id in (None, key.id)]
    return fitting[0] if len(fitting) == 1 or (fitting and key_id is not None) else None


def _parse_key(entry: Any) -> VerifyingKey | None:
    if not isinstance(entry, dict) or entry.get("kty") not in ("RSA", "EC", "OKP"):
        return None
    public = {name: value for name, value in entry.items() if name in ("kty", "n", "e", "crv", "x", "y")}
    try:
        if entry.get("use", "sig") != "sig" or "verify" not in entry.get("key_ops", ["verify"]):
            return None
        key = jwt.PyJWK(public).key
    except (jwt.PyJWTError, ValueError, TypeError):
        return None
    algorithms = _algorithms(key)
    if "alg" in entry:
        algorithms &= {str(entry["alg"])}
    key_id = entry.get("kid")
    return VerifyingKey(key_id if isinstance(key_id, str) else None, key, algorithms) if algorithms else None


def _algorithms(key: object) -> frozenset[str]:
    match key:
        case rsa.RSAPublicKey():
            return RSA_ALGORITHMS if key.key_size >= MIN_RSA_BITS else frozenset()
        case ec.EllipticCurvePublicKey():
            return frozenset({CURVES[key.curve.name]}) if key.curve.name in CURVES else frozenset()
        case ed25519.Ed25519PublicKey() | ed448.Ed448PublicKey():
            return frozenset({"EdDSA"})
        case _:
            return frozenset()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
