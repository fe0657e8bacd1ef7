"""The slow, obvious reference: one forward over all tokens of a prompt, with an explicit mask that says who sees whom."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from families import build
from ostinato import Engine
from ostinato.engine.attention import AttentionLayer
from ostinato.models.decoder import Decoder
from ostinato.models.linear import Backend
from ostinato.models.weights import load_model_files
from ostinato.prompt.span import Prompt


class Families:
    """An engine of each family in float32, made once, and its decoder for the reference."""

    def __init__(self, folders: pytest.TempPathFactory, **options: int) -> None:
        self._folders, self._options = folders, options
        self._made: dict[str, tuple[Engine, Decoder]] = {}

    def __call__(self, name: str) -> tuple[Engine, Decoder]:
        if name not in self._made:
            folder = self._folders.mktemp(name)
            build(name, folder)
            self._made[name] = Engine(str(folder), dtype="float32", **self._options), decoder_of(folder)
        return self._made[name]


def decoder_of(folder: Path) -> Decoder:
    """The model in float32, in plain PyTorch."""
    config, weights = load_model_files(folder)
    return Decoder(
        config, weights, Backend(torch.float32, torch.device("cpu"), None, 4096), max_positions=1024
    )


def dense_logits(decoder: Decoder, prompt: Prompt) -> Tensor:
    """Logits of the tokens of the prompt's last chain, [tokens, vocab]."""
    owner, number, position, home, tokens = [], [], [], [], []
    for index, chain in enumerate(prompt.chains):
        for i, token in enumerate(chain.token_ids):
            owner.append(index)
            number.append(i)
            position.append(chain.start + i)
            home.append((chain.start if chain.home is None else chain.home) + i)
            tokens.append(token)
    size = len(tokens)
    mask = torch.zeros(size, size, dtype=torch.bool)
    for q in range(size):
        views = {view.chain: view for view in prompt.chains[owner[q]].sees}
        for k in range(size):
            if owner[k] == owner[q]:
                mask[q, k] = number[k] <= number[q]
            elif (view := views.get(owner[k])) is not None:
                end = len(prompt.chains[owner[k]].token_ids) if view.end is None else view.end
                mask[q, k] = view.start <= number[k] < end and position[k] <= home[q]
    # A moved chain computes at its home, itself included; whoever else looks at it finds it where it was moved.
    own = torch.tensor(owner)[:, None] == torch.tensor(owner)[None, :]
    at, at_home = torch.tensor(position), torch.tensor(home)
    distance = torch.where(own, at_home[:, None] - at_home[None, :], at_home[:, None] - at[None, :])

    def attend(layer: AttentionLayer, qkv: Tensor) -> Tensor:
        heads = qkv.view(size, -1, layer.head_dim)
        q, k, v = heads.split((layer.heads, layer.kv_heads, layer.kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = norm(q, layer.q_norm, layer.norm_eps), norm(k, layer.k_norm, layer.norm_eps)
        group = layer.heads // layer.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        k_own, k_other = k, k
        if layer.cos is not None and layer.sin is not None:
            q = turn(q, layer.cos[at_home], layer.sin[at_home])
            k_own = turn(k, layer.cos[at_home], layer.sin[at_home])
            k_other = turn(k, layer.cos[at], layer.sin[at])
        scores = torch.where(
            own, torch.einsum("qhd,khd->hqk", q, k_own), torch.einsum("qhd,khd->hqk", q, k_other)
        )
        scores = scores * layer.scale
        if layer.slopes is not None:
            scores = scores - layer.slopes[:, None, None] * distance
        seen = mask if layer.window is None else mask & (distance < layer.window)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)

    logits = decoder.forward(torch.tensor(tokens), attend, torch.arange(size))
    return logits[-len(prompt.chains[-1].token_ids) :]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
