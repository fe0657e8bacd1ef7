"""Ostinato computes the repeating parts of prompts once, wherever they stand, and shares them safely."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ostinato.access.principal import Principal
    from ostinato.engine.engine import Engine, EngineStats
    from ostinato.engine.request import Chunk, Reply, SamplingParams, Timing, TokenLogprob, Usage

__all__ = [
    "Chunk",
    "Engine",
    "EngineStats",
    "Principal",
    "Reply",
    "SamplingParams",
    "Timing",
    "TokenLogprob",
    "Usage",
    "__version__",
]

_HOME = {"Engine": "engine.engine", "EngineStats": "engine.engine", "Principal": "access.principal"}


def __getattr__(name: str) -> Any:
    # PyTorch takes seconds to import: it is loaded with the first use of a name that needs it.
    if name not in __all__:
        raise AttributeError(f"module 'ostinato' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"ostinato.{_HOME.get(name, 'engine.request')}")
    return getattr(module, name)
