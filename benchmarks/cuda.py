"""What a CUDA device gives: a random Llama of about one billion weights, cold and cached, one request and eight.

    python benchmarks/cuda.py

No model hub is needed: speed does not depend on what the weights say. Prints one JSON object.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

from ostinato import Engine, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from families import byte_tokenizer

VOCAB = 32_000


def build(folder: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=16_384, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    byte_tokenizer(VOCAB).save(str(folder / "tokenizer.json"))


def main() -> None:
    rng = random.Random(0)

    def params(count: int) -> SamplingParams:
        return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(2, VOCAB) for _ in range(count)]

    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        with Engine(folder, device="cuda", max_batch_tokens=2048) as engine:
            engine.generate(tokens(4096), params(4))
            for count in (512, 4096, 12_000):
                cold, cached, decode = [], [], []
                for _ in range(3):
                    prompt = tokens(count)
                    reply = engine.generate(prompt, params(33))
                    cold.append(reply.timing.ttft)
                    decode.append(32 / (reply.timing.total - reply.timing.ttft))
                    cached.append(engine.generate(prompt, params(1)).timing.ttft)
                report[f"{count}"] = {
                    "cold_ttft_ms": round(statistics.median(cold) * 1000, 1),
                    "cached_ttft_ms": round(statistics.median(cached) * 1000, 1),
                    "decode_tokens_per_s": round(statistics.median(decode), 1),
                }
            start = time.perf_counter()
            streams = [engine.stream(tokens(256), params(64)) for _ in range(8)]
            total = sum(len(chunk.token_ids) for stream in streams for chunk in stream)
            report["eight_at_once_tokens_per_s"] = round(total / (time.perf_counter() - start), 1)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
