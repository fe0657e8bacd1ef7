"""Tokens of issuers for the tests: keys, key sets, and what is signed with them."""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER = "https://login.acme.com"
AUDIENCE = "ostinato"
Json = dict[str, Any]


@cache
def key(name: str) -> Any:
    """The private key of a name; its beginning says of what kind."""
    match name.split("-")[0]:
        case "rsa":
            return rsa.generate_private_key(65537, 2048)
        case "weak":
            return rsa.generate_private_key(65537, 1024)
        case "p256":
            return ec.generate_private_key(ec.SECP256R1())
        case "p384":
            return ec.generate_private_key(ec.SECP384R1())
        case "k1":
            return ec.generate_private_key(ec.SECP256K1())
        case _:
            return ed25519.Ed25519PrivateKey.generate()


def public(name: str, kid: str | None = "", **extra: Any) -> Json:
    """The public key of a name, as a set has it."""
    kinds = {"rsa": "RS256", "weak": "RS256", "p256": "ES256", "p384": "ES384", "k1": "ES256K", "ed": "EdDSA"}
    algorithm = jwt.get_algorithm_by_name(kinds[name.split("-")[0]])
    entry: Json = json.loads(algorithm.to_jwk(key(name).public_key()))
    entry.pop("key_ops", None)
    return entry | ({} if kid is None else {"kid": kid or name}) | extra


def claims(**changed: Any) -> Json:
    now = int(time.time())
    full = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "alice",
        "org": "acme",
        "groups": ["finance"],
        "exp": now + 600,
        "iat": now,
        "nbf": now,
    }
    return {name: value for name, value in (full | changed).items() if value is not None}


def token(
    signer: str = "rsa",
    algorithm: str = "RS256",
    kid: str | None = "",
    header: Json | None = None,
    **changed: Any,
) -> str:
    headers = (header or {}) | ({} if kid is None else {"kid": kid or signer})
    return jwt.encode(claims(**changed), key(signer), algorithm, headers)
