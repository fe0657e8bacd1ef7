"""Eviction policies, one file each."""

from __future__ import annotations

from collections.abc import Callable

from ostinato.cache.policy.arc import ARC
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.fifo import FIFO
from ostinato.cache.policy.gdsf import GDSF
from ostinato.cache.policy.lecar import LeCaR
from ostinato.cache.policy.lfu import LFU
from ostinato.cache.policy.lru import LRU
from ostinato.cache.policy.s3fifo import S3FIFO
from ostinato.cache.policy.sieve import Sieve
from ostinato.cache.policy.tlru import TLRU
from ostinato.cache.policy.wa import WA


# NumPy takes a tenth of a second to import, and `ostinato --help` lists these names.
def _unicache(blocks: int) -> Policy:
    from ostinato.cache.policy.unicache import UniCache

    return UniCache(blocks)


def _saecache(blocks: int) -> Policy:
    from ostinato.cache.policy.saecache import SAECache

    return SAECache(blocks)


def _ostinato(blocks: int) -> Policy:
    from ostinato.cache.policy.ostinato import Ostinato

    return Ostinato(blocks)


POLICIES: dict[str, Callable[[int], Policy]] = {
    "lru": lambda _blocks: LRU(),
    "lfu": lambda _blocks: LFU(),
    "fifo": lambda _blocks: FIFO(),
    "s3fifo": S3FIFO,
    "sieve": lambda _blocks: Sieve(),
    "arc": ARC,
    "lecar": LeCaR,
    "gdsf": lambda _blocks: GDSF(),
    "tlru": lambda _blocks: TLRU(),
    "wa": WA,
    "unicache": _unicache,
    "saecache": _saecache,
    "ostinato": _ostinato,
}
"""Every policy that needs no knowledge of the future, by name; made for a cache of so many blocks."""

DEFAULT_POLICY = "ostinato"
