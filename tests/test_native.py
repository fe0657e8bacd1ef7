"""The compiled kernels against dense references, for this machine and for plainer instruction sets."""

from __future__ import annotations

import math
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ostinato.native import build
from ostinato.native.kernels import AttentionBatch, Kernels, load

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")

DTYPES = [torch.float32, torch.bfloat16]


# What an instruction set needs of the machine, as /proc/cpuinfo puts it.
ARCHITECTURES = {"native": "", "icelake-server": "avx512_vnni", "x86-64-v3": "avx2", "x86-64": "sse2"}


def has(flag: str) -> bool:
    cpu = Path("/proc/cpuinfo")
    return not flag or (cpu.exists() and flag in cpu.read_text().split())


@pytest.fixture(params=[arch for arch, flag in ARCHITECTURES.items() if has(flag)])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    kernels = load(request.param)
    assert kernels is not None, "a compiler is there, so the kernels have to build"
    torch.manual_seed(0)
    return kernels


def close(got: torch.Tensor, want: torch.Tensor, fp32: float = 2e-6, bf16: float = 1e-2) -> None:
    """Compares relative to the size of the reference as a whole."""
    tolerance = bf16 if got.dtype == torch.bfloat16 else fp32
    want = want.double()
    error = (got.double() - want).abs().max().item()
    assert error <= tolerance * max(want.abs().max().item(), 1e-3), error


# ---- linear ----


def quantised(
    rows: int, columns: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
    scale = (torch.rand(rows, columns // 32) * 0.02 + 1e-3).half().float()
    minimum = (-scale * (2**bits / 2) + torch.randn_like(scale) * 0.01).half().float()
    weight = codes.double() * scale.double().repeat_interleave(32, 1) + minimum.double().repeat_interleave(
        32, 1
    )
    return codes, scale, minimum, weight


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What 8 bits per group of 32 leave of x."""
    groups = x.float().unflatten(-1, (-1, 32))
    step = groups.abs().amax(-1, keepdim=True) / 127
    codes = torch.round(groups * torch.where(step > 0, 1 / step, 0.0))
    return (codes.double() * step.double()).flatten(-2)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 32), (16, 64), (37, 96), (576, 1536), (100, 608)])
def test_dequantise(kernels: Kernels, bits: int, shape: tuple[int, int]) -> None:
    codes, scale, minimum, weight = quantised(*shape, bits)
    got = kernels.dequantise(kernels.pack(codes, scale, minimum, bits))
    close(got, weight, bf16=4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 32), (37, 96), (160, 576), (70, 1536)])
def test_linear(kernels: Kernels, bits: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    codes, scale, minimum, weight = quantised(*shape, bits)
    packed = kernels.pack(codes, scale, minimum, bits)
    rows, columns = shape
    for m in (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 40, 64, 70):
        x = torch.randn(m, columns + 7).to(dtype)[:, :columns]
        x[0, :32] = 0
        want = x.double() @ weight.T
        wide = torch.full((m, rows + 5), 7.0, dtype=dtype)
        got = kernels.linear(x, packed, wide[:, 2 : 2 + rows])
        # Either x is rounded to 8 bits, or (many rows) x and the weights to bf16.
        exact = rounded(x) @ weight.T
        scaled = max(want.abs().max().item(), 1e-3)
        assert (got.double() - want).abs().max().item() < 2e-2 * scaled
        if m <= 8:
            assert (got.double() - exact).abs().max().item() < (
                3e-6 if dtype == torch.float32 else 8e-3
            ) * scaled
        assert (wide[:, :2] == 7).all()
        assert (wide[:, 2 + rows :] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 4, 9, 24, 50])
def test_linear_fused(kernels: Kernels, m: int, dtype: torch.dtype) -> None:
    rows, columns = 75, 192
    codes, scale, minimum, weight = quantised(rows, columns, 4)
    packed = kernels.pack(codes, scale, minimum, 4)
    bias = torch.randn(rows)
    residual = torch.randn(m, rows).to(dtype)
    norm = torch.rand(columns) + 0.5
    x = torch.randn(m, columns).to(dtype)
    hidden = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    want = hidden @ weight.T + bias.double() + residual.double()
    out = residual.clone()
    kernels.linear(x, packed, out, bias, out, norm_weight=norm, eps=1e-5)
    close(out, want, fp32=1.5e-2, bf16=2e-2)
    out32 = torch.empty(m, rows)
    kernels.linear(x, packed, out32, norm_weight=norm, eps=1e-5)
    close(out32, hidden @ weight.T, fp32=1.5e-2)
    gate_up = torch.randn(m, 2 * columns).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    for name, function in ACTIVATIONS.items():
        got = kernels.linear(gate_up, packed, torch.empty(m, rows, dtype=dtype), activation=name)
        close(got, (function(gate) * up) @ weight.T, fp32=1.5e-2, bf16=2e-2)


# ---- elementwise ----

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 40), (5, 17), (300, 576)])
def test_rms_norm(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape[0], shape[1] + 3).to(dtype)[:, : shape[1]]
    weight = torch.randn(shape[1])
    want = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    out = torch.empty(shape, dtype=dtype)
    close(kernels.rms_norm(x, weight, 1e-6, out), want)
    residual = torch.randn(shape).to(dtype)
    want = want + residual.double()
    close(kernels.rms_norm(x, weight, 1e-6, residual, residual), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1536), (3, 40), (5, 17), (200, 1536)])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_gated(kernels: Kernels, activation: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    x[0, 0], x[0, 1] = 100, -100
    gate, up = x.double().chunk(2, -1)
    close(kernels.gated(x, torch.empty(shape, dtype=dtype), activation), ACTIVATIONS[activation](gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (16, 16), (80, 20), (32, 0), (256, 256), (128, 64)])
@pytest.mark.parametrize("tokens", [1, 5, 200])
def test_rope_store(
    kernels: Kernels, tokens: int, dim: int, rotary: int, norm: bool, dtype: torch.dtype
) -> None:
    heads, kv_heads, capacity = 6, 2, 400
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim + 8).to(dtype)[:, : (heads + 2 * kv_heads) * dim]
    positions = torch.randint(0, 1000, (tokens,), dtype=torch.int32)
    slots = torch.randperm(capacity)[:tokens].to(torch.int32)
    angle = torch.rand(1000, rotary // 2) * 6 if rotary else None
    cos, sin = (None, None) if angle is None else (angle.cos(), angle.sin())
    q_norm, k_norm = (torch.rand(dim), torch.rand(dim)) if norm else (None, None)
    pool = torch.zeros(2, kv_heads, capacity + 3, dim, dtype=dtype)[:, :, :capacity]
    q_out = torch.empty(tokens, heads, dim, dtype=dtype)
    kernels.rope_store(qkv, positions, slots, cos, sin, q_out, pool[0], pool[1], q_norm, k_norm, 1e-5)

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        if cos is None or sin is None:
            return x
        a, b, rest = x.split([rotary // 2, rotary // 2, dim - rotary], -1)
        c, s = cos[positions.long()].double()[:, None], sin[positions.long()].double()[:, None]
        return torch.cat([a * c - b * s, b * c + a * s, rest], -1)

    q, k, v = qkv.double().unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], 1)
    close(q_out, turned(q, q_norm))
    close(pool[0][:, slots.long()], turned(k, k_norm).transpose(0, 1))
    assert (pool[1][:, slots.long()].double() == v.transpose(0, 1)).all()
    untouched = torch.ones(capacity, dtype=torch.bool)
    untouched[slots.long()] = False
    assert (pool[:, :, untouched] == 0).all()


# ---- attention ----


class Case:
    """Sequences with runs in shuffled order and gaps between positions; the last run ends in the queries."""

    def __init__(
        self,
        counts: list[tuple[int, int]],
        dim: int,
        group: int,
        kv_heads: int,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        chance = random.Random(seed)
        total = sum(a + b for a, b in counts)
        self.capacity = 2 * total + 64
        self.kv_heads, self.group = kv_heads, group
        heads = kv_heads * group
        pool = torch.randn(2, kv_heads, self.capacity + 5, dim).to(dtype)[:, :, : self.capacity]
        self.k, self.v = pool[0], pool[1]
        self.sequences: list[tuple[list[int], list[tuple[int, int, int]]]] = []
        free = 0
        for queries, keys in counts:
            runs: list[tuple[int, int, int]] = []
            position, left = chance.randrange(3), keys
            while left > 0:
                n = min(left, chance.choice([1, 2, 16, 31, 64, 100, 333]))
                free += chance.randrange(2)
                runs.append((free, n, position))
                free += n
                position += n + chance.choice([0, 0, 1, 40])
                left -= n
            own = list(range(position, position + queries))
            runs.append((free, queries, position))
            free += queries
            chance.shuffle(runs)
            self.sequences.append((own, runs))
        assert free <= self.capacity
        unused = torch.ones(self.capacity, dtype=torch.bool)
        for _, runs in self.sequences:
            for slot, length, _ in runs:
                unused[slot : slot + length] = False
        pool[:, :, unused] = float("nan")  # a slot that no run names must not be looked at
        self.q = torch.randn(sum(a for a, _ in counts), heads, dim).to(dtype)

    def batch(self) -> AttentionBatch:
        query_start, run_start = [0], [0]
        positions: list[int] = []
        runs: list[tuple[int, int, int]] = []
        for own, mine in self.sequences:
            positions += own
            runs += mine
            query_start.append(len(positions))
            run_start.append(len(runs))
        slot, length, position = ([run[i] for run in runs] for i in range(3))
        return AttentionBatch(query_start, positions, run_start, slot, length, position)

    def want(self, scale: float, window: int, slopes: torch.Tensor | None) -> torch.Tensor:
        out, at = [], 0
        for own, runs in self.sequences:
            slots = torch.cat([torch.arange(s, s + n) for s, n, _ in runs]) if runs else torch.empty(0).long()
            places = (
                torch.cat([torch.arange(p, p + n) for _, n, p in runs]) if runs else torch.empty(0).long()
            )
            q = self.q[at : at + len(own)].double()
            at += len(own)
            k = self.k[:, slots].double().repeat_interleave(self.group, 0)
            v = self.v[:, slots].double().repeat_interleave(self.group, 0)
            score = torch.einsum("qhd,hkd->hqk", q, k) * scale
            distance = torch.tensor(own)[:, None] - places[None]
            if slopes is not None:
                score = score - slopes.double()[:, None, None] * distance
            seen = (distance >= 0) & ((distance < window) if window else True)
            weight = torch.nan_to_num(score.masked_fill(~seen, float("-inf")).softmax(-1))
            out.append(torch.einsum("hqk,hkd->qhd", weight, v))
        return torch.cat(out)

    def check(self, kernels: Kernels, window: int = 0, slopes: torch.Tensor | None = None) -> torch.Tensor:
        scale = self.q.size(-1) ** -0.5
        out = torch.full_like(self.q, float("nan"))
        kernels.attend(self.q, self.k, self.v, out, self.batch(), scale, window, slopes)
        close(out, self.want(scale, window, slopes), fp32=4e-6, bf16=2e-2)
        return out


COUNTS = {
    "decode": [(1, 700)],
    "decode many": [(1, 5), (1, 0), (1, 300), (1, 1000), (1, 64), (1, 127), (1, 33)],
    "short": [(2, 90), (3, 17), (5, 200)],
    "prefill": [(150, 0)],
    "chunk": [(70, 400)],
    "mixed": [(1, 200), (40, 150), (1, 0), (17, 0), (2, 31)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", list(COUNTS))
@pytest.mark.parametrize(("dim", "group", "kv_heads"), [(64, 3, 3), (64, 1, 2), (64, 8, 1)])
def test_attend(
    kernels: Kernels, dim: int, group: int, kv_heads: int, counts: str, dtype: torch.dtype
) -> None:
    case = Case(COUNTS[counts], dim, group, kv_heads, dtype)
    case.check(kernels)
    case.check(kernels, window=50)
    case.check(kernels, slopes=torch.rand(group * kv_heads) * 0.2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 32, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 20])
def test_attend_dims(kernels: Kernels, dim: int, group: int, dtype: torch.dtype) -> None:
    Case(COUNTS["mixed"], dim, group, 2, dtype, seed=dim).check(kernels, window=100)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_nothing_visible(kernels: Kernels, dtype: torch.dtype) -> None:
    case = Case([(1, 20), (1, 0), (30, 10)], 32, 2, 2, dtype)
    case.sequences[1] = (case.sequences[1][0], [])
    own, runs = case.sequences[2]
    case.sequences[2] = (own, [run for run in runs if run[2] != own[0]])  # keys far back, out of the window
    out = case.check(kernels, window=4)
    assert (out[1] == 0).all()
    assert (out[-1] == 0).all()


def test_attend_large_scores(kernels: Kernels) -> None:
    for dtype in DTYPES:
        case = Case([(1, 300), (40, 300)], 64, 3, 1, dtype)
        case.q *= 30
        case.check(kernels)


def test_attend_alone_or_together(kernels: Kernels) -> None:
    case = Case([(1, 500), (33, 200), (1, 70), (4, 300)], 64, 3, 3, torch.float32)
    together = case.check(kernels)
    everything, at = case.sequences, 0
    for sequence in everything:
        n = len(sequence[0])
        alone = torch.empty(n, *case.q.shape[1:])
        case.sequences = [sequence]
        kernels.attend(case.q[at : at + n], case.k, case.v, alone, case.batch(), 0.125)
        assert (alone - together[at : at + n]).abs().max() < 2e-6
        at += n


def test_one_thread_or_two(kernels: Kernels) -> None:
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            Case([(1, 900), (50, 600)], 64, 3, 3, torch.float32).check(kernels)
            Case([(1, 900), (1, 5), (1, 400)], 64, 3, 3, torch.bfloat16).check(kernels)
    finally:
        torch.set_num_threads(threads)


# ---- build ----


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_NATIVE", "0")
    assert build.load.__wrapped__() is None


@pytest.mark.parametrize("compiler", ["/nowhere/g++", "false"])
def test_no_compiler(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path))
    assert build.load.__wrapped__() is None
    assert len(caplog.records) == 1
    assert "using PyTorch" in caplog.text


def test_failed_compile_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path))
    assert build.load.__wrapped__("no-such-machine") is None
    assert len(caplog.records) == 1
    assert list((tmp_path / "native").iterdir()) == []


def test_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path))
    first = build.load.__wrapped__("x86-64")
    files = list((tmp_path / "native").iterdir())
    second = build.load.__wrapped__("x86-64")
    assert first is not None
    assert second is not None
    assert len(files) == 1
    assert list((tmp_path / "native").iterdir()) == files


def test_one_openmp_runtime(kernels: Kernels) -> None:
    assert kernels.crossover
    code = (
        "import torch; from pathlib import Path; from ostinato.native import build\n"
        "assert build.load() is not None\n"
        "print(len(set(build._RUNTIME.findall(Path('/proc/self/maps').read_text()))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_two_parts_merges_to_the_whole(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 200, 32).to(dtype)
    q = torch.randn(7, 6, 32).to(dtype)
    positions = [150, 151, 152, 160, 170, 180, 190]

    def batch(runs: list[tuple[int, int, int]]) -> AttentionBatch:
        return AttentionBatch(
            [0, 7], positions, [0, len(runs)], *([run[i] for run in runs] for i in range(3))
        )

    def attend(runs: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty_like(q), torch.empty(7, 6)
        kernels.attend(q, keys, values, out, batch(runs), 0.2, lse=lse)
        return out, lse

    whole, lse = attend([(0, 200, 0)])
    scores = torch.einsum("thd,hsd->ths", q.float(), keys.float().repeat_interleave(3, 0)) * 0.2
    hidden = torch.arange(200)[None, :] > torch.tensor(positions)[:, None]
    expected = scores.masked_fill(hidden[:, None], float("-inf")).logsumexp(-1) / math.log(2)
    torch.testing.assert_close(lse, expected, atol=2e-2, rtol=0)
    for cut in (1, 64, 160, 199):
        first, first_lse = attend([(0, cut, 0)])
        second, second_lse = attend([(cut, 200 - cut, cut)])
        kernels.merge(first, second, first_lse, second_lse)
        torch.testing.assert_close(first, whole, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_keys_equal_rotation(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pool = torch.randn(4, 2, 50, 48).to(dtype)
    before = pool.clone()
    angle = torch.rand(16) * 6
    kernels.turn_keys(pool, [1, 3], 7, 20, angle.cos(), angle.sin())
    a, b = before[[1, 3], :, 7:27, :16].float(), before[[1, 3], :, 7:27, 16:32].float()
    expected = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    got = pool[[1, 3], :, 7:27, :32].float()
    torch.testing.assert_close(got, expected, atol=1e-5 if dtype == torch.float32 else 3e-2, rtol=0)
    pool[[1, 3], :, 7:27, :32] = before[[1, 3], :, 7:27, :32]
    assert torch.equal(pool, before)
