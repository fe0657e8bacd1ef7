"""The models of the tests, each made or loaded once for all, and a server."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from families import build
from ostinato import Engine
from server_fixtures import DEADLINE, serving


@pytest.fixture(scope="session", autouse=True)
def access_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing here touches the keys of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OSTINATO_ACCESS", str(tmp_path_factory.mktemp("access") / "access.db"))
        yield


@pytest.fixture
def import_benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a file of `benchmarks/` by its name; they import each other."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module


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


@pytest.fixture(scope="module")
def url(exact_engine: Engine) -> Iterator[str]:
    """A server whose replies are exact; files that want another one define their own."""
    with serving(exact_engine) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=DEADLINE) as client:
        yield client


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE) as client:
        yield client
