"""GGUF files: values against the gguf package, names and row orders against converted checkpoints, damage."""

from __future__ import annotations

import functools
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.errors import ModelFormatError, ModelNotFoundError
from ostinato.models.catalogue import resolve
from ostinato.models.config_readers import config_from_gguf
from ostinato.models.gguf_file import GGUFFile
from ostinato.models.quant import from_ggml
from ostinato.models.tokenizer import Tokenizer
from ostinato.models.weights import QuantTensor, content_hash, load_model_files

H, HEADS, KV_HEADS, DIM, INNER, VOCAB = 64, 4, 2, 16, 96, 40


def blocks(kind: Q, rows: int, columns: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random bytes that are valid blocks: the half-precision scales are small and finite."""
    rng = np.random.default_rng(seed)
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows * columns // size, nbytes), dtype=np.uint8)
    scales = {Q.Q4_0: [0], Q.Q5_0: [0], Q.Q8_0: [0], Q.Q6_K: [208]}.get(kind, [0, 2])
    if kind in (Q.Q2_K, Q.Q3_K):
        scales = [80, 82] if kind is Q.Q2_K else [108]
    for at in scales:
        data[:, at : at + 2] = rng.uniform(-0.1, 0.1, (len(data), 1)).astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q4_K, Q.Q5_K])
def test_values_are_those_of_the_gguf_package_to_the_bit(kind: Q) -> None:
    data = blocks(kind, 6, 512)
    tensor = from_ggml(data, kind, "w")
    assert isinstance(tensor, QuantTensor)
    assert tensor.shape == (6, 512)
    assert tensor.bits == (4 if kind in (Q.Q4_0, Q.Q4_1, Q.Q4_K) else 8)
    assert int(tensor.codes.max()) < 2**tensor.bits
    assert torch.equal(tensor.dequantise(), torch.from_numpy(gguf.quants.dequantize(data, kind)))


def test_q6_k_is_requantised_within_its_promise() -> None:
    data = blocks(Q.Q6_K, 6, 512)
    tensor = from_ggml(data, Q.Q6_K, "w")
    assert isinstance(tensor, QuantTensor)
    exact = torch.from_numpy(gguf.quants.dequantize(data, Q.Q6_K)).view(6, -1, 32)
    error = (tensor.dequantise().view(6, -1, 32) - exact).abs().amax(-1)
    spread = exact.amax(-1) - exact.amin(-1)
    assert bool((error <= spread / 510 * 1.001 + 1e-6).all())


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K])
def test_other_formats_become_float(kind: Q) -> None:
    data = blocks(kind, 2, 512)
    tensor = from_ggml(data, kind, "w")
    assert isinstance(tensor, Tensor)
    assert torch.equal(tensor, torch.from_numpy(gguf.quants.dequantize(data, kind)))


def test_half_formats() -> None:
    values = torch.randn(3, 8)
    for dtype, kind in ((torch.float32, Q.F32), (torch.float16, Q.F16), (torch.bfloat16, Q.BF16)):
        data = values.to(dtype).view(torch.uint8).numpy()
        tensor = from_ggml(data, kind, "w")
        assert isinstance(tensor, Tensor)
        assert torch.equal(tensor.float(), values.to(dtype).float())


def test_a_format_nobody_can_read_is_named() -> None:
    with pytest.raises(ModelFormatError, match=r"'blk\.0\.x'.*I8"):
        from_ggml(np.zeros((1, 32), np.uint8), Q.I8, "blk.0.x")


def test_rows_permutes_every_part() -> None:
    tensor = from_ggml(blocks(Q.Q4_1, 5, 64), Q.Q4_1, "w")
    assert isinstance(tensor, QuantTensor)
    order = torch.tensor([3, 1, 4, 0, 2])
    assert torch.equal(tensor.rows(order).dequantise(), tensor.dequantise()[order])


def weights_of(architecture: str) -> dict[str, Tensor]:
    """A random checkpoint under canonical names."""
    torch.manual_seed(1)
    q, kv = HEADS * DIM, KV_HEADS * DIM
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCAB, H), "final_norm.weight": (H,)}
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (H,),
        "q": (q, H),
        "k": (kv, H),
        "v": (kv, H),
        "o": (H, q),
    }
    layer |= {"up": (INNER, H), "down": (H, INNER)}
    if architecture not in ("falcon", "mpt"):
        layer |= {"gate": (INNER, H), "ffn_norm": (H,)}
    if architecture == "mpt":
        layer |= {"ffn_norm": (H,)}
    if architecture in ("qwen3", "gemma3"):
        layer |= {"q_norm": (DIM,), "k_norm": (DIM,)}
    if architecture == "gemma3":
        layer |= {"post_attn_norm": (H,), "post_ffn_norm": (H,)}
    for i in range(2):
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        if architecture == "qwen2":
            shapes |= {f"layers.{i}.{name}.bias": layer[name][:1] for name in "qkv"}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


GGUF_NAMES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "post_attn_norm": "post_attention_norm",
    "post_ffn_norm": "post_ffw_norm",
}


def write_gguf(
    path: Path, architecture: str, extra: dict[str, Tensor] | None = None, **metadata: Any
) -> None:
    """Writes the checkpoint as llama.cpp's converter does: llama's q and k interleaved, some qkv fused."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(H)
    writer.add_block_count(2)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_layer_norm_eps(1e-5)
    writer.add_sliding_window(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(
        [*(chr(97 + i) for i in range(26)), *(f"<|{i}|>" for i in range(VOCAB - 28)), "ab", "<|im_end|>"]
    )
    writer.add_token_types([1] * 26 + [3] * (VOCAB - 28) + [1, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(26)
    for key, value in metadata.items():
        writer.add_float32(f"{architecture}.{key.replace('__', '.')}", value)
    tensors: dict[str, Tensor] = {**(extra or {})}
    weights = weights_of(architecture)
    if architecture in ("falcon", "mpt"):
        for i in range(2):
            parts = [weights.pop(f"layers.{i}.{name}.weight") for name in "qkv"]
            tensors[f"blk.{i}.attn_qkv.weight"] = torch.cat(parts)
    for name, value in weights.items():
        if name.startswith("layers."):
            _, i, short, part = name.split(".")
            if architecture == "llama" and short in ("q", "k"):
                heads = HEADS if short == "q" else KV_HEADS
                value = value.view(heads, 2, DIM // 2, -1).transpose(1, 2).reshape(value.shape)
            tensors[f"blk.{i}.{GGUF_NAMES.get(short, short)}.{part}"] = value
        else:
            tensors[{"embed": "token_embd.weight", "final_norm.weight": "output_norm.weight"}[name]] = value
    for name, value in tensors.items():
        data = value.contiguous().numpy()
        if value.ndim == 2 and architecture == "llama":
            writer.add_tensor(name, gguf.quants.quantize(data, Q.Q8_0), raw_dtype=Q.Q8_0)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "falcon", "mpt"])
def test_a_converted_checkpoint_comes_back(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, architecture)
    config, loaded = load_model_files(path)
    assert (config.hidden_size, config.heads, config.kv_heads, config.head_dim) == (H, HEADS, KV_HEADS, DIM)
    assert config.eos_token_ids == (26, VOCAB - 1)
    expected = weights_of(architecture)
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        value = tensor.dequantise() if isinstance(tensor, QuantTensor) else tensor
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0.02 if architecture == "llama" else 0)
    if architecture == "gemma3":
        assert [layer.window for layer in config.layers] == [16, 16]
    if architecture == "mpt":
        assert config.alibi_slopes == (0.25, 0.0625, 0.015625, 0.00390625)
    if architecture == "falcon":
        assert config.parallel_block


def test_llama3_frequency_factors_are_applied(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    factors = torch.linspace(1, 8, DIM // 2)
    write_gguf(path, "llama", {"rope_freqs.weight": factors})
    rope = load_model_files(path)[0].layers[0].rope
    assert rope is not None
    assert rope.inv_freq == pytest.approx(
        [1e4 ** (-2 * i / DIM) / float(factors[i]) for i in range(DIM // 2)]
    )


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", {"blk.0.attn_sinks.weight": torch.zeros(H)})
    with pytest.raises(ModelFormatError, match=r"blk\.0\.attn_sinks\.weight"):
        load_model_files(path)


def test_a_missing_file_and_other_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        load_model_files(tmp_path / "none.gguf")
    for content, message in (
        (b"", "empty"),
        (b"PK\3\4 zip", "not a GGUF"),
        (b"GGUF\0\0\0\3" + b"\0" * 40, "big-endian"),
    ):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(ModelFormatError, match=message):
            load_model_files(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (struct.pack("<4sIQQ", b"GGUF", 9, 0, 0), "version 9"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 0), "tensors are announced"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**60), "metadata entries are announced"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**62) + b"k" * 20, "truncated"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 2**61), "strings are announced"),
        (struct.pack("<4sIQQQ1sII", b"GGUF", 3, 0, 1, 1, b"k", 77, 0), "value type 77"),
    ],
)
def test_absurd_headers(head: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(head)
    with pytest.raises(ModelFormatError, match=message):
        GGUFFile(tmp_path / "x.gguf")


@functools.cache
def sound_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        write_gguf(path, "llama")
        return path.read_bytes()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damage_gives_a_format_error_and_nothing_else(data: st.DataObject) -> None:
    damaged = bytearray(sound_file())
    # The header is where damage matters; it ends before the first 4,000 bytes.
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, 4000))
        damaged[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 127, 128, 255])))
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(damaged)
        for read in (load_model_files, Tokenizer.from_path):
            try:
                read(path)
            except ModelFormatError:
                continue


def test_the_real_model() -> None:
    path = resolve("smollm2-135m")
    start = time.perf_counter()
    config, weights = load_model_files(path)
    # It takes 0.4 s alone on two cores; the bound leaves room for a busy machine.
    assert time.perf_counter() - start < 5
    assert (config.hidden_size, len(config.layers), config.kv_heads, config.vocab_size) == (576, 30, 3, 49152)
    assert config.eos_token_ids == (2, 0)
    file = GGUFFile(path)
    assert config == config_from_gguf(file.metadata)
    for name, canonical in (("token_embd", "embed"), ("blk.7.ffn_down", "layers.7.down.weight")):
        tensor = file.tensors[f"{name}.weight"]
        reference = torch.from_numpy(gguf.quants.dequantize(file.data(tensor), tensor.type))
        loaded = weights[canonical]
        assert isinstance(loaded, QuantTensor)
        assert torch.equal(loaded.dequantise(), reference)


def test_the_content_hash_is_of_the_content(tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.write_bytes(b"GGUF one")
    second.write_bytes(b"GGUF one")
    assert content_hash(first) == content_hash(second)
    second.write_bytes(b"GGUF two!")
    assert content_hash(first) != content_hash(second)
