"""Keys of blocks: SHA-256 over everything that determines the KV values, and nothing else.

A block's key hashes its parent's key, its token ids and its extra keys; the first block's parent is a
root key. Every field is length-prefixed, so that no two different inputs can encode alike, and every
number has a fixed width, so that keys are equal across processes and machines.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from array import array
from collections.abc import Iterable, Sequence


def encode_fields(fields: Iterable[bytes]) -> bytes:
    """Canonical encoding of a list of byte strings: each with its length before it."""
    return b"".join(struct.pack("<Q", len(field)) + field for field in fields)


def model_fingerprint(
    content_hash: bytes, dtype: str, quantisation: str, config: str, block_size: int
) -> bytes:
    """Identity of the model as far as KV values go: weights by content, dtype, settings, layout."""
    fields = (
        content_hash,
        dtype.encode(),
        quantisation.encode(),
        config.encode(),
        struct.pack("<Q", block_size),
    )
    return hashlib.sha256(b"ostinato model\0" + encode_fields(fields)).digest()


def root_key(
    fingerprint: bytes, *, kind: str = "prefix", start: int = 0, context: bytes = b"", secret: bytes = b""
) -> bytes:
    """Key of the attention context that a chain starts from.

    Args:
        fingerprint: the model's fingerprint.
        kind: "prefix" for an ordinary prompt.
        start: position of the chain's first token.
        context: what is guaranteed to be seen before `start`; empty for a prefix.
        secret: of the chain's scope. Without it nobody can tell which blocks are cached in the scope, whatever
            else is known.
    """
    fields = (fingerprint, kind.encode(), struct.pack("<Q", start), context)
    return hmac.digest(secret, b"ostinato root\0" + encode_fields(fields), "sha256")


def block_key(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Key of a block of `token_ids` that follows the block (or root) of key `parent`."""
    tokens = array("I", token_ids).tobytes()
    # One prefix for the three fields: this is the hot path, 1 µs a block.
    header = b"ostinato block\0" + struct.pack("<QQQ", len(parent), len(tokens), len(extra))
    return hashlib.sha256(header + parent + tokens + extra).digest()


def chain_keys(
    parent: bytes, token_ids: Sequence[int], block_size: int, *, partial: bool = False
) -> list[bytes]:
    """Keys of the full blocks of `token_ids` that follow `parent`, each chained to the one before it.

    With `partial` the last block has a key too where it is not full.
    """
    keys: list[bytes] = []
    for start in range(0, len(token_ids) if partial else len(token_ids) - block_size + 1, block_size):
        parent = block_key(parent, token_ids[start : start + block_size])
        keys.append(parent)
    return keys
