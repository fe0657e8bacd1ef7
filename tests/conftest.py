"""The models of the tests, each made or loaded once for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from families import build
from ostinato import Engine


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """SmolLM2-135M as a user gets it: quantised weights, bfloat16 KV where the CPU computes it."""
    with Engine("smollm2-135m", kv_tokens=16_384) as engine:
        yield engine


@pytest.fixture(scope="session")
def exact_engine() -> Iterator[Engine]:
    """SmolLM2-135M dequantised to float32: replies are exact."""
    with Engine("smollm2-135m", dtype="float32", kv_tokens=8_192) as engine:
        yield engine


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights, loaded in no time."""
    folder = tmp_path_factory.mktemp("tiny")
    build("llama", folder)
    return folder
