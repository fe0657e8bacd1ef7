"""Exactness: the same logits and greedy tokens as `transformers`, in float32, whatever the engine does.

Cache hits, chunks of any size, preemption and company in the batch may change how a token is computed,
never which token it is.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from families import FAMILIES, VOCAB, build
from ostinato import Engine, SamplingParams
from ostinato.cache.pool import Pool, Run
from ostinato.engine.attention import AttentionBatch, attend
from ostinato.models.catalogue import resolve
from ostinato.models.decoder import Decoder
from ostinato.models.linear import Backend
from ostinato.models.weights import load_model_files
from ostinato.native import kernels

GREEDY = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)

Family = tuple[Any, Path]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Builds each family's model once."""

    @functools.cache
    def get(name: str) -> Family:
        folder = tmp_path_factory.mktemp(name)
        return build(name, folder), folder

    return get


def prompt_tokens(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def is_greedy(model: Any, prompt: list[int], tokens: list[int]) -> bool:
    """True if `transformers` decodes greedily to `tokens`: by induction, from one forward over them all."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist() == tokens


def our_logits(
    folder: Path,
    chunks: list[list[int]],
    *,
    scattered: bool = False,
    native: bool = True,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logits of every token of the concatenated `chunks`, computed chunk by chunk over a pool of runs."""
    config, weights = load_model_files(folder)
    device = torch.device("cpu")
    total = sum(map(len, chunks))
    compiled = kernels.load() if native else None
    decoder = Decoder(config, weights, Backend(dtype, device, compiled, 512), max_positions=total)
    pool = Pool(
        layers=len(config.layers), kv_heads=config.kv_heads, head_dim=config.head_dim, blocks=64,
        block_size=8, dtype=dtype, device=device,
    )  # fmt: skip
    blocks = list(range(-(-total // 8)))
    if scattered:
        random.Random(1).shuffle(blocks)
    parts, done = [], 0
    for chunk in chunks:
        end = done + len(chunk)
        runs = tuple(Run(blocks[i] * 8, min(8, end - i * 8), i * 8) for i in range(-(-end // 8)))
        if scattered:
            runs = runs[::-1]
        batch = AttentionBatch(
            starts=(0, len(chunk)),
            positions=torch.arange(done, end, dtype=torch.int32),
            slots=torch.tensor([blocks[i // 8] * 8 + i % 8 for i in range(done, end)], dtype=torch.int32),
            runs=(runs,),
        )
        parts.append(
            decoder.forward(
                torch.tensor(chunk), partial(attend, pool, batch, compiled), torch.arange(len(chunk))
            )
        )
        done = end
    return torch.cat(parts)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_logits_equal_transformers(family: Callable[[str], Family], name: str, native: bool) -> None:
    model, folder = family(name)
    tokens = prompt_tokens(90)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.05  # or a difference would not show
    for chunks in ([tokens], [tokens[:1], tokens[1:40], tokens[40:41], tokens[41:]]):
        for scattered in (False, True):
            got = our_logits(folder, chunks, scattered=scattered, native=native)
            torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(family: Callable[[str], Family], name: str) -> None:
    model, folder = family(name)
    prompts = [prompt_tokens(n, seed=n) for n in (1, 15, 16, 17, 70)]
    for options in (
        {},
        {"max_batch_tokens": 7, "block_size": 4},
        {"kv_tokens": 192, "max_batch_tokens": 32},  # too small for all: preemption
    ):
        with Engine(str(folder), dtype="float32", **({"kv_tokens": 2048} | options)) as engine:
            streams = [engine.stream(p, GREEDY) for p in prompts]  # all in one batch, strangers to each other
            replies = [[t for chunk in stream for t in chunk.token_ids] for stream in streams]
            for prompt, tokens in zip(prompts, replies, strict=True):
                assert len(tokens) == 64
                assert is_greedy(model, prompt, tokens), options
            if "kv_tokens" in options:
                assert engine.stats().preemptions > 0
                continue
            for prompt, tokens in zip(prompts, replies, strict=True):
                reply = engine.generate(prompt, GREEDY)
                assert list(reply.token_ids) == tokens, options
                assert reply.usage.cached_tokens == len(prompt) - 1
                turn = [*prompt, *tokens, 5, 6, 7]  # the next turn of a chat hits generated tokens
                again = engine.generate(turn, GREEDY)
                assert again.usage.cached_tokens == len(prompt) + len(tokens) - 1
                assert is_greedy(model, turn, list(again.token_ids))


def test_real_model_equals_transformers(exact_engine: Engine) -> None:
    """SmolLM2 dequantised, against `transformers` reading the same GGUF with its own loader."""
    path = resolve("smollm2-135m")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    text = (Path(__file__).parents[1] / "README.md").read_text()[:2400]
    tokens = exact_engine.encode(text).token_ids
    for _ in ("cold", "cached"):
        assert is_greedy(model, tokens, list(exact_engine.generate(tokens, GREEDY).token_ids))
    logprobs = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
    reply = exact_engine.generate(tokens, logprobs)
    with torch.inference_mode():
        reference = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    for top in reply.logprobs[0].top:
        assert abs(top.logprob - float(reference[top.token_id])) < 1e-3


@pytest.mark.parametrize("chunk", [1, 16, 512], ids=["decode", "small-batch", "prefill"])
def test_quantised_run_is_close_to_the_exact_one(exact_engine: Engine, chunk: int) -> None:
    """4-bit weights and bfloat16, each of the kernels that a batch size selects: KL from float32."""
    path = resolve("smollm2-135m")
    text = (Path(__file__).parents[1] / "docs" / "how-it-works.md").read_text()
    tokens = exact_engine.encode(text).token_ids[:192]
    exact = our_logits(path, [tokens]).log_softmax(-1)
    chunks = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
    close = our_logits(path, chunks, dtype=torch.bfloat16).log_softmax(-1)
    kl = (exact.exp() * (exact - close)).sum(-1)
    assert float(kl.mean()) < 0.01
    assert float((exact.argmax(-1) == close.argmax(-1)).float().mean()) > 0.9
