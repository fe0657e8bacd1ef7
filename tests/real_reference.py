"""The real SmolLM2 as `transformers` runs it: the GGUF's tensors, dequantised by the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from ostinato.models.catalogue import resolve


def smollm2_reference(_folder: Path) -> Any:
    """A float32 `LlamaForCausalLM` loaded by transformers' own GGUF reader."""
    path = resolve("smollm2-135m")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
