"""Eviction policies, one file each."""

from __future__ import annotations

from collections.abc import Callable

from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.lru import LRU
from ostinato.cache.policy.tlru import TLRU

POLICIES: dict[str, Callable[[int], Policy]] = {
    "lru": lambda _blocks: LRU(),
    "tlru": lambda _blocks: TLRU(),
}
"""Every policy that needs no knowledge of the future, by name; made for a cache of so many blocks."""
