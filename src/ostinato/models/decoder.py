"""The decoder: one transformer, driven by `ModelConfig`, for every supported family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ostinato.engine.attention import AttentionLayer
from ostinato.errors import ModelFormatError
from ostinato.models.config import ModelConfig, Rope
from ostinato.models.linear import Backend, Linear, Norm, Weight, activate, stack
from ostinato.models.weights import QuantTensor


class Attend(Protocol):
    """Writes a layer's keys and values to the pool and attends; see `engine.attention.attend`."""

    def __call__(self, layer: AttentionLayer, qkv: Tensor) -> Tensor: ...


class Projections:
    """Several linear layers that read the same input; their outputs stand side by side."""

    def __init__(self, parts: list[tuple[Weight, Tensor | None]], backend: Backend) -> None:
        weight = stack([w for w, _ in parts])
        biases = [b for _, b in parts if b is not None]
        if weight is not None and len(biases) in (0, len(parts)):
            parts = [(weight, torch.cat(biases) if biases else None)]
        self.linears = [Linear(w, b, backend) for w, b in parts]

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        if len(self.linears) == 1:
            return self.linears[0](x, norm=norm)
        x = x if norm is None else norm(x)
        return torch.cat([linear(x) for linear in self.linears], dim=-1)


@dataclass(frozen=True)
class Layer:
    """One decoder layer's weights. Optional norms are None where the family has none."""

    attention: AttentionLayer
    attn_norm: Norm
    qkv: Projections
    o: Linear
    ffn_norm: Norm | None
    up: Projections
    down: Linear
    post_attn_norm: Norm | None
    post_ffn_norm: Norm | None


class Decoder:
    """Computes logits; keeps no state between calls, all KV is in the pool."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        backend: Backend,
        *,
        max_positions: int,
    ) -> None:
        self.config = config
        self.backend = backend
        builder = _Builder(config, weights, backend, max_positions)
        self.layers = [builder.layer(i) for i in range(len(config.layers))]
        self.final_norm = builder.required_norm("final_norm")
        embed = builder.take("embed")
        self.embed = (embed.dequantise() if isinstance(embed, QuantTensor) else embed).to(
            backend.device, backend.dtype
        )
        head = weights.get("head", embed)
        # Logits are wanted for a few rows only: a dense copy of a quantised head would never be used.
        self.head = Linear(head, weights_bias(weights, "head"), replace(backend, max_rows=1), torch.float32)

    def forward(self, token_ids: Tensor, attend: Attend, rows: Tensor) -> Tensor:
        """The logits of `states`, [wanted, vocab] float32."""
        return self.logits(self.states(token_ids, attend, rows))

    @torch.inference_mode()
    def states(self, token_ids: Tensor, attend: Attend, rows: Tensor) -> Tensor:
        """One step over the tokens of any number of sequences.

        Args:
            token_ids: [tokens] int64.
            attend: attention of one layer over the batch's runs.
            rows: [wanted] int64, the tokens whose states are wanted.

        Returns:
            What the last layer leaves, before the final norm, [wanted, hidden]. The next step may overwrite it.
        """
        config, kernels = self.config, self.backend.kernels
        if kernels is not None:
            # Dense weights run in PyTorch's OpenMP threads: the kernels between them have to share those.
            kernels.use_openmp(not self.layers[0].down.prefers_packed(len(token_ids)))
        x = self.embed[token_ids]
        if config.embedding_scale != 1.0:
            x = x * torch.tensor(config.embedding_scale, dtype=x.dtype)
        for layer in self.layers:
            # A parallel block's MLP reads the same normed input; otherwise the norm can go into the projection.
            h = layer.attn_norm(x) if config.parallel_block else x
            qkv = layer.qkv(h, None if config.parallel_block else layer.attn_norm)
            if config.qkv_clip is not None:
                qkv = qkv.clamp_(-config.qkv_clip, config.qkv_clip)
            a = attend(layer.attention, qkv)
            if layer is self.layers[-1]:
                # Past the last attention only the wanted tokens matter.
                a, x, h = a[rows], x[rows], h[rows]
            if config.parallel_block:
                h = h if layer.ffn_norm is None else layer.ffn_norm(x)
                x = self._mlp(layer, h, None, residual=layer.o(a, residual=x))
                continue
            x = (
                layer.o(a, residual=x)
                if layer.post_attn_norm is None
                else layer.post_attn_norm(layer.o(a), x)
            )
            if layer.post_ffn_norm is None:
                x = self._mlp(layer, x, layer.ffn_norm, residual=x)
            else:
                x = layer.post_ffn_norm(self._mlp(layer, x, layer.ffn_norm, residual=None), x)
        return x

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """Logits of states, [wanted, vocab] float32."""
        logits = self.head(states, norm=self.final_norm)
        scale = self.config.logit_scale
        return logits if scale == 1.0 else logits * scale

    def _mlp(self, layer: Layer, x: Tensor, norm: Norm | None, residual: Tensor | None) -> Tensor:
        up = layer.up(x, norm)
        if self.config.gated_mlp:
            return layer.down(up, gate=self.config.activation, residual=residual)
        return layer.down(activate(up, self.config.activation), residual=residual)


def weights_bias(weights: Mapping[str, Weight], name: str) -> Tensor | None:
    """The bias of linear layer `name`, if the checkpoint has one."""
    bias = weights.get(f"{name}.bias")
    return bias if isinstance(bias, Tensor) else None


def rope_tables(rope: Rope, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, [positions, rotary_dim / 2] float32."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), torch.tensor(rope.inv_freq))
    return (
        (angles.cos() * rope.attention_factor).to(device).contiguous(),
        (angles.sin() * rope.attention_factor).to(device).contiguous(),
    )


class _Builder:
    """Puts a checkpoint's tensors into layers."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        backend: Backend,
        max_positions: int,
    ) -> None:
        self.config, self.weights, self.backend, self.device = config, weights, backend, backend.device
        ropes = {layer.rope for layer in config.layers if layer.rope is not None}
        self.tables = {rope: rope_tables(rope, max_positions, self.device) for rope in ropes}

    def take(self, name: str) -> Weight:
        key = name if name in self.weights else f"{name}.weight"
        if key not in self.weights:
            raise ModelFormatError(
                f"The checkpoint has no tensor {name!r}, which a {self.config.architecture} model needs."
            )
        return self.weights[key]

    def pair(self, name: str) -> tuple[Weight, Tensor | None]:
        return self.take(name), weights_bias(self.weights, name)

    def linear(self, name: str) -> Linear:
        weight, bias = self.pair(name)
        return Linear(weight, bias, self.backend)

    def norm(self, name: str) -> Norm | None:
        if f"{name}.weight" not in self.weights:
            return None
        return self.required_norm(name)

    def required_norm(self, name: str) -> Norm:
        weight, bias = self.vector(name), weights_bias(self.weights, name)
        bias = None if bias is None else bias.to(self.device, torch.float32)
        return Norm(weight, bias, self.config.norm, self.config.norm_eps, self.backend.kernels)

    def vector(self, name: str) -> Tensor:
        weight = self.take(name)
        assert isinstance(weight, Tensor)
        return weight.to(self.device, torch.float32).contiguous()

    def optional_vector(self, name: str) -> Tensor | None:
        return self.vector(name) if f"{name}.weight" in self.weights else None

    def layer(self, i: int) -> Layer:
        config, at = self.config, f"layers.{i}."
        settings = config.layers[i]
        cos, sin = (None, None) if settings.rope is None else self.tables[settings.rope]
        slopes = (
            None if config.alibi_slopes is None else torch.tensor(config.alibi_slopes, device=self.device)
        )
        attention = AttentionLayer(
            index=i,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            window=settings.window,
            cos=cos,
            sin=sin,
            q_norm=self.optional_vector(at + "q_norm"),
            k_norm=self.optional_vector(at + "k_norm"),
            norm_eps=config.norm_eps,
            slopes=slopes,
        )
        up = [at + "gate", at + "up"] if config.gated_mlp else [at + "up"]
        return Layer(
            attention=attention,
            attn_norm=self.required_norm(at + "attn_norm"),
            qkv=Projections([self.pair(at + name) for name in "qkv"], self.backend),
            o=self.linear(at + "o"),
            ffn_norm=self.norm(at + "ffn_norm"),
            up=Projections([self.pair(name) for name in up], self.backend),
            down=self.linear(at + "down"),
            post_attn_norm=self.norm(at + "post_attn_norm"),
            post_ffn_norm=self.norm(at + "post_ffn_norm"),
        )
