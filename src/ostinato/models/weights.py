"""Loads a model's configuration and its tensors, under canonical names, from GGUF or safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ostinato.errors import ModelFormatError, ModelNotFoundError
from ostinato.files import file_sha256
from ostinato.models.config import ModelConfig
from ostinato.models.config_readers import config_from_gguf, config_from_hf
from ostinato.models.gguf_file import GGUFFile
from ostinato.models.names import Translate, expected_shapes, gguf_names, hf_names, required_in_layer
from ostinato.models.quant import QuantTensor, from_ggml

__all__ = ["Progress", "QuantTensor", "Weights", "content_hash", "load_model_files"]

Weights = dict[str, Tensor | QuantTensor]
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""

_TIED_BY_DEFAULT = ("gemma3", "falcon", "mpt")


def load_model_files(path: Path, *, progress: Progress | None = None) -> tuple[ModelConfig, Weights]:
    """The configuration and the tensors of a `.gguf` file or of a Hugging Face folder.

    Every tensor is checked against the configuration: the decoder can rely on names and shapes.
    RMSNorm weights are such that y = normed x * weight in every family; q, k and v are separate, in the
    row order of half-split (NeoX) RoPE.
    """
    if path.is_dir():
        return _load_hf(path, progress)
    if not path.exists():
        raise ModelNotFoundError(f"{path} does not exist. Give a .gguf file or a Hugging Face folder.")
    return _load_gguf(path, progress)


def content_hash(path: Path) -> bytes:
    """SHA-256 that identifies a model by the content of its files, wherever they lie."""
    if not path.exists():
        raise ModelNotFoundError(f"{path} does not exist. Give a .gguf file or a Hugging Face folder.")
    if path.is_file():
        return file_sha256(path)
    total = hashlib.sha256()
    for file in (path / "config.json", *_safetensors_files(path)):
        total.update(file_sha256(file))
    return total.digest()


def _load_gguf(path: Path, progress: Progress | None) -> tuple[ModelConfig, Weights]:
    file = GGUFFile(path)
    divisors = file.tensors.get("rope_freqs.weight")
    factors = None
    if divisors is not None:
        values = from_ggml(file.data(divisors), divisors.type, divisors.name)
        factors = (values.dequantise() if isinstance(values, QuantTensor) else values).flatten().tolist()
    config = config_from_gguf(file.metadata, rope_divisors=factors)
    total = sum(tensor.nbytes for tensor in file.tensors.values())

    def tensors() -> Iterator[tuple[str, Tensor | QuantTensor]]:
        done = 0
        for tensor in file.tensors.values():
            if len(tensor.shape) > 2:
                raise ModelFormatError(f"{path}: tensor {tensor.name!r} has more than two dimensions.")
            value = from_ggml(file.data(tensor), tensor.type, tensor.name)
            yield tensor.name, value[0] if isinstance(value, Tensor) and len(tensor.shape) == 1 else value
            done += tensor.nbytes
            if progress is not None:
                progress(done, total)

    translate = gguf_names(two_norms="blk.0.attn_norm_2.weight" in file.tensors)
    weights = _renamed(tensors(), translate, path)
    if config.architecture == "llama":
        _undo_rope_interleaving(weights, config)
    _split_fused(weights, config, grouped=False)
    _check(weights, config, path)
    return config, weights


def _load_hf(folder: Path, progress: Progress | None) -> tuple[ModelConfig, Weights]:
    config_json = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else None
    config = config_from_hf(config_json, generation)
    files = _safetensors_files(folder)
    total = sum(file.stat().st_size for file in files)

    def tensors() -> Iterator[tuple[str, Tensor | QuantTensor]]:
        done = 0
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                        tensor = opened.get_tensor(name)
                        yield name, tensor
                        done += tensor.nbytes
                        if progress is not None:
                            progress(min(done, total), total)
            except (SafetensorError, OSError) as error:
                raise ModelFormatError(f"{file} cannot be read: {error}. Download it again.") from error
        if progress is not None:
            progress(total, total)

    weights = _renamed(tensors(), hf_names(config), folder)
    for name, tensor in weights.items():
        weights[name] = _usable(name, cast("Tensor", tensor))
    if config.architecture == "gemma3":
        for name, tensor in weights.items():
            if name.endswith("norm.weight"):
                weights[name] = cast("Tensor", tensor).float() + 1
    _split_fused(weights, config, grouped=config.architecture == "falcon")
    if _tied(config_json, config):
        weights.pop("head", None)
    elif "head" not in weights:
        raise ModelFormatError(
            f"{folder}: lm_head.weight is missing and tie_word_embeddings is false. Download the model again."
        )
    _check(weights, config, folder)
    return config, weights


def _tied(config_json: Mapping[str, Any], config: ModelConfig) -> bool:
    default = config.architecture in _TIED_BY_DEFAULT
    text = config_json.get("text_config")
    inner = text.get("tie_word_embeddings", default) if isinstance(text, dict) else default
    return bool(config_json.get("tie_word_embeddings", inner))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: Any = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ModelFormatError(
            f"{path.parent} holds no {path.name}. Give a .gguf file or a Hugging Face model folder."
        ) from error
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} must hold a JSON object.")
    return cast("dict[str, Any]", value)


def _safetensors_files(folder: Path) -> list[Path]:
    index_path = folder / "model.safetensors.index.json"
    if index_path.exists():
        shards = _read_json(index_path).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ModelFormatError(f"{index_path} holds no weight_map of file names.")
        names = sorted(set(cast("dict[str, str]", shards).values()))
        # A shard is a file of this folder: an index must not lead out of it.
        files = [folder / Path(name).name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFormatError(f"{folder} holds no .safetensors file. Convert the checkpoint to safetensors.")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelFormatError(f"{folder}: {', '.join(missing)} is missing. Download the model again.")
    return files


def _renamed(
    tensors: Iterator[tuple[str, Tensor | QuantTensor]], translate: Translate, path: Path
) -> Weights:
    weights: Weights = {}
    for name, tensor in tensors:
        try:
            canonical = translate(name)
        except KeyError as error:
            raise ModelFormatError(
                f"{path}: tensor {name!r} is not part of this architecture as Ostinato knows it, "
                "so the model would give wrong answers. Use another checkpoint."
            ) from error
        if canonical is None:
            continue
        if canonical in weights:
            raise ModelFormatError(f"{path}: {name!r} is a second tensor for {canonical!r}.")
        weights[canonical] = tensor
    return weights


def _usable(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float32, torch.bfloat16):
        return tensor
    if tensor.dtype == torch.float16:
        return tensor.float()
    raise ModelFormatError(
        f"Tensor {name!r} has dtype {tensor.dtype}; float32, float16 and bfloat16 are supported."
    )


def _rows(tensor: Tensor | QuantTensor, index: Tensor) -> Tensor | QuantTensor:
    return tensor.rows(index) if isinstance(tensor, QuantTensor) else tensor[index]


def _undo_rope_interleaving(weights: Weights, config: ModelConfig) -> None:
    """GGUF `llama` files order the rows of q and k for interleaved RoPE: (0, d/2, 1, d/2+1, ...)."""
    for layer in range(len(config.layers)):
        for name, heads in (("q", config.heads), ("k", config.kv_heads)):
            rows = torch.arange(heads * config.head_dim)
            order = rows.view(heads, config.head_dim // 2, 2).transpose(1, 2).flatten()
            for part in ("weight", "bias"):
                key = f"layers.{layer}.{name}.{part}"
                if key in weights and weights[key].shape[0] == len(order):
                    weights[key] = _rows(weights[key], order)


def _split_fused(weights: Weights, config: ModelConfig, *, grouped: bool) -> None:
    """Splits `qkv`; `grouped`: for each key-value head its queries, its key and its value (Falcon)."""
    heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
    rows = torch.arange((heads + 2 * kv_heads) * dim)
    if grouped:
        groups = rows.view(kv_heads, heads // kv_heads + 2, dim)
        parts = {"q": groups[:, :-2].flatten(), "k": groups[:, -2].flatten(), "v": groups[:, -1].flatten()}
    else:
        q, k, v = rows.split([heads * dim, kv_heads * dim, kv_heads * dim])
        parts = {"q": q, "k": k, "v": v}
    for key in [key for key in weights if ".qkv." in key]:
        fused = weights.pop(key)
        if fused.shape[0] != len(rows):
            raise ModelFormatError(
                f"The fused projection {key!r} has {fused.shape[0]} rows, not {len(rows)}."
            )
        for name, index in parts.items():
            weights[key.replace(".qkv.", f".{name}.")] = _rows(fused, index)


def _check(weights: Weights, config: ModelConfig, path: Path) -> None:
    """Raises unless every tensor is expected, has its shape, and every layer has the same ones."""
    shapes = expected_shapes(config)
    count = len(config.layers)
    present: list[set[str]] = [set() for _ in range(count)]
    for name, tensor in weights.items():
        short = name
        if name.startswith("layers."):
            _, number, short = name.split(".", 2)
            if int(number) >= count:
                raise ModelFormatError(f"{path}: {name!r} is of a layer past the {count} configured.")
            present[int(number)].add(short)
        expected = shapes.get(short)
        if expected is None:
            raise ModelFormatError(f"{path}: {name!r} is not part of this configuration.")
        if tuple(tensor.shape) != expected:
            raise ModelFormatError(
                f"{path}: {name!r} has shape {list(tensor.shape)}, but the configuration makes it "
                f"{list(expected)}. The file is corrupt, or its metadata is of another model."
            )
    required = required_in_layer(config)
    missing = [name for name in ("embed", "final_norm.weight") if name not in weights]
    missing += [f"layers.{i}.{name}" for i in range(count) for name in sorted(required - present[i])]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelFormatError(f"{path}: {', '.join(missing[:3])}{more} missing. Download the model again.")
    uneven = next((i for i in range(count) if present[i] != present[0]), None)
    if uneven is not None:
        odd = ", ".join(sorted(present[uneven] ^ present[0]))
        raise ModelFormatError(f"{path}: layers 0 and {uneven} differ in {odd}.")
