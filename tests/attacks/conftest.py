"""The servers that are attacked: one as it comes, and one with `--release-once`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from attack_fixtures import Site, Town, town_of
from ostinato import Engine


@pytest.fixture(scope="session")
def town(tiny_model: Path) -> Iterator[Town]:
    with Engine(str(tiny_model), dtype="float32", kv_tokens=16_384) as engine, town_of(engine) as town:
        yield town


@pytest.fixture(scope="session")
def town_once(tiny_model: Path) -> Iterator[Town]:
    with (
        Engine(str(tiny_model), dtype="float32", kv_tokens=16_384, release_once=True) as engine,
        town_of(engine) as town,
    ):
        yield town


@pytest.fixture
def site(town: Town) -> Site:
    return town.site()


@pytest.fixture
def site_once(town_once: Town) -> Site:
    return town_once.site()
