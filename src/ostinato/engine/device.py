"""Where and in what precision to compute, and how much memory the KV pool may take."""

from __future__ import annotations

import os

import torch

from ostinato.errors import InvalidRequestError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MAX_DEFAULT_KV_TOKENS = 262_144


def choose_device(device: str) -> torch.device:
    """The device named, or for "auto" the first CUDA device if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InvalidRequestError(
            f"No device {device!r}: use auto, cpu, cuda or cuda:N.", param="device"
        ) from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequestError("CUDA was asked for, but this PyTorch sees no CUDA device.", param="device")
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype named, or for "auto" bfloat16 where the device computes it natively."""
    if dtype == "auto":
        native = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    if dtype not in DTYPES:
        raise InvalidRequestError(f"No dtype {dtype!r}: use auto, bfloat16 or float32.", param="dtype")
    return DTYPES[dtype]


def choose_kv_tokens(
    asked: int | None, bytes_per_token: int, device: torch.device, context_length: int
) -> int:
    """Size of the KV pool in tokens: as asked, or what fits in a quarter of the free memory."""
    if asked is not None:
        if asked < 1:
            raise InvalidRequestError(f"kv_tokens must be at least 1, not {asked}.", param="kv_tokens")
        return asked
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(min(free // 4 // bytes_per_token, MAX_DEFAULT_KV_TOKENS), min(context_length, 4096))
