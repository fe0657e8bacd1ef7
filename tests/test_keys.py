"""Keys: everything that determines the KV is in them, encoded without ambiguity, equal everywhere."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from ostinato.cache.keys import block_key, chain_keys, encode_fields, model_fingerprint, root_key

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=8)


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_fields_encode_without_collision(a: list[bytes], b: list[bytes]) -> None:
    assert (encode_fields(a) == encode_fields(b)) == (a == b)


@given(TOKENS, TOKENS, st.binary(max_size=4), st.binary(max_size=4))
def test_block_keys_differ_with_any_field(a: list[int], b: list[int], x: bytes, y: bytes) -> None:
    parent = b"p" * 32
    assert (block_key(parent, a, x) == block_key(parent, b, y)) == (a == b and x == y)
    assert block_key(b"q" * 32, a, x) != block_key(parent, a, x)


def test_every_part_of_the_model_is_in_the_root() -> None:
    base = (b"hash", "bfloat16", "packed", "config", 16)
    others = [
        (b"hasi", *base[1:]),
        (b"hash", "float32", *base[2:]),
        (*base[:2], "dense", *base[3:]),
        (*base[:3], "config2", 16),
        (*base[:4], 32),
    ]
    roots = {root_key(model_fingerprint(*fields)) for fields in [base, *others]}
    roots |= {
        root_key(model_fingerprint(*base), kind="module", start=s, context=c)
        for s in (0, 5)
        for c in (b"", b"c")
    }
    assert len(roots) == 10


def test_chain_covers_full_blocks_only() -> None:
    keys = chain_keys(b"root", list(range(50)), 16)
    assert len(keys) == 3
    assert keys[0] == block_key(b"root", range(16))
    assert keys[2] == block_key(keys[1], range(32, 48))
    assert chain_keys(b"root", list(range(15)), 16) == []


def test_keys_are_equal_across_processes() -> None:
    code = "from ostinato.cache.keys import *; print(chain_keys(root_key(b'm'), range(64), 16)[-1].hex())"
    expected = chain_keys(root_key(b"m"), range(64), 16)[-1].hex()
    for seed in ("0", "1"):
        got = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        )
        assert got.stdout.strip() == expected
