"""Small Triton kernels with known answers, executed as machine code of one architecture: `python -m ... gfx950`.

A process of its own, because kernels decorated under TRITON_INTERPRET=1, as the tests' are, cannot be compiled. It prints
one line of JSON a check: its name, and what was wrong with it ("" if nothing).
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
import triton.language as tl

CHECKS: dict[str, Callable[[str], str]] = {}
WARPS = (1, 2, 4, 8)


def check(name: str) -> Callable[[Callable[[str], str]], Callable[[str], str]]:
    """Registers a check: given the architecture, it says what is wrong, or nothing."""

    def register(function: Callable[[str], str]) -> Callable[[str], str]:
        CHECKS[name] = function
        return function

    return register


def differs(got: torch.Tensor, want: torch.Tensor, relative: float = 0.0, absolute: float = 0.0) -> str:
    """The first difference, NaN equal to NaN; tensors of 8-bit floats are compared as numbers."""
    a, b = got.double().reshape(-1), want.double().reshape(-1)
    near = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= absolute + relative * b.abs())
    if got.shape == want.shape and bool(near.all()):
        return ""
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, should be {tuple(want.shape)}"
    at = int((~near).nonzero()[0])
    return f"[{at}]={a[at].item()!r}, should be {b[at].item()!r}; {int((~near).sum())} of {len(a)} differ"


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(low: int, high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ------------------------------------------------------------------------------------------------------ elementwise


@triton.jit
def _one(x, y, n, HOW: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < n, other=1)
    if HOW == "exp":
        r = tl.exp(a)
    elif HOW == "exp2":
        r = tl.exp2(a)
    elif HOW == "log":
        r = tl.log(a)
    elif HOW == "log2":
        r = tl.log2(a)
    elif HOW == "sqrt":
        r = tl.sqrt(a)
    elif HOW == "sqrt_rn":
        r = tl.sqrt_rn(a)
    elif HOW == "rsqrt":
        r = tl.rsqrt(a)
    elif HOW == "sin":
        r = tl.sin(a)
    elif HOW == "cos":
        r = tl.cos(a)
    elif HOW == "erf":
        r = tl.erf(a)
    elif HOW == "floor":
        r = tl.floor(a)
    elif HOW == "ceil":
        r = tl.ceil(a)
    elif HOW == "abs":
        r = tl.abs(a)
    elif HOW == "sigmoid":
        r = tl.sigmoid(a)
    else:
        r = a
    tl.store(y + at, r.to(y.dtype.element_ty), mask=at < n)


# `tl.exp` is 2 ** (x * log2(e)) with the product rounded: its error grows with x.
_ONES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "exp": (torch.exp, 6e-6), "exp2": (torch.exp2, 4e-7), "log": (torch.log, 4e-7), "log2": (torch.log2, 4e-7),
    "sqrt": (torch.sqrt, 2e-7), "sqrt_rn": (torch.sqrt, 6e-8), "rsqrt": (torch.rsqrt, 2e-7), "sin": (torch.sin, 4e-7),
    "cos": (torch.cos, 4e-7), "erf": (torch.erf, 4e-7), "floor": (torch.floor, 0), "ceil": (torch.ceil, 0), "abs": (torch.abs, 0),
    "sigmoid": (torch.sigmoid, 6e-6),
}  # fmt: skip


def _one_check(how: str) -> Callable[[str], str]:
    def run(arch: str) -> str:
        function, relative = _ONES[how]
        x = torch.cat(
            [drawn(900) * 8, torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-30, 88.0, -87.0])]
        )
        x = x.abs() if how in ("log", "log2", "sqrt", "sqrt_rn", "rsqrt") else x
        y = torch.empty_like(x)
        _one[(triton.cdiv(len(x), 256),)](x, y, len(x), HOW=how, BLOCK=256)
        return differs(y, function(x.double()).float(), relative, 2e-7 if how in ("sin", "cos", "log", "log2") else 0)

    return run


for _how in _ONES:
    check(f"elementwise {_how}")(_one_check(_how))


def _double_check(how: str) -> Callable[[str], str]:
    def run(arch: str) -> str:
        x = torch.cat(
            [drawn(300, dtype=torch.float64).abs() * 8, torch.tensor([0.0, 1.0, math.inf, math.nan, 1e-310, 1e300])]
        )
        x = -x if how in ("exp", "floor") else x
        y = torch.empty_like(x)
        _one[(triton.cdiv(len(x), 256),)](x, y, len(x), HOW=how, BLOCK=256)
        return differs(y, _ONES[how][0](x), 0 if how == "floor" else 1e-15)

    return run


for _how in ("exp", "log", "sqrt", "rsqrt", "erf", "floor"):
    check(f"elementwise {_how} of doubles")(_double_check(_how))


@triton.jit
def _two(x, y, z, n, HOW: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + at, mask=at < n, other=1), tl.load(y + at, mask=at < n, other=1)
    if HOW == "div":
        r = a / b
    elif HOW == "div_rn":
        r = tl.div_rn(a, b)
    elif HOW == "floordiv":
        r = a // b
    elif HOW == "mod":
        r = a % b
    elif HOW == "mul":
        r = a * b
    elif HOW == "add":
        r = a + b
    elif HOW == "shl":
        r = a << b
    elif HOW == "shr":
        r = a >> b
    elif HOW == "umulhi":
        r = tl.umulhi(a, b)
    elif HOW == "maximum":
        r = tl.maximum(a, b)
    elif HOW == "maximum_nan":
        r = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif HOW == "minimum_nan":
        r = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif HOW == "less":
        r = (a < b).to(tl.int32)
    elif HOW == "where":
        r = tl.where(a > b, a - b, b * 2)
    else:
        r = a
    tl.store(z + at, r.to(z.dtype.element_ty), mask=at < n)


def _run_two(how: str, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    z = torch.empty(len(x), dtype=dtype or x.dtype)
    _two[(triton.cdiv(len(x), 128),)](x, y, z, len(x), HOW=how, BLOCK=128)
    return z


@check("division is correctly rounded by div_rn")
def _division_rounded(arch: str) -> str:
    bits = integers(-(2**31), 2**31 - 1, 2, 1000, dtype=torch.int32)
    x, y = bits.view(torch.float32)
    return differs(_run_two("div_rn", x, y), (x.double() / y.double()).float())


@check("division of doubles is correctly rounded")
def _division_of_doubles(arch: str) -> str:
    bits = integers(-(2**63), 2**63 - 1, 2, 1000, dtype=torch.int64)
    near = (
        integers(1, 2**53, 2, 1000, dtype=torch.int64, seed=1).double()
        * 2.0 ** integers(-530, 530, 2, 1000, seed=2).double()
    )
    x, y = torch.cat([bits.view(torch.float64), near, near.flip(1) * 2.0**-500], 1)
    return differs(_run_two("div", x, y), x / y)


@check("division of floats")
def _division(arch: str) -> str:
    x, y = drawn(777), drawn(777, seed=1)
    return differs(_run_two("div", x, y), x / y, 2e-7)


@check("maximum and minimum of NaN")
def _nan(arch: str) -> str:
    x = torch.tensor([1.0, math.nan, 2.0, math.nan, -0.0, 0.0, math.inf, -math.inf])
    y = torch.tensor([2.0, 3.0, math.nan, math.nan, 0.0, -0.0, 1.0, 1.0])
    said = differs(_run_two("maximum_nan", x, y), torch.maximum(x, y)) or differs(
        _run_two("minimum_nan", x, y), torch.minimum(x, y)
    )
    return said or differs(_run_two("maximum", x, y), torch.fmax(x, y))


def _integer_check(how: str, dtype: torch.dtype) -> Callable[[str], str]:
    def run(arch: str) -> str:
        bits = torch.iinfo(dtype).bits
        x, y = (integers(torch.iinfo(dtype).min, torch.iinfo(dtype).max, 500, seed=s, dtype=dtype) for s in (0, 1))
        small = integers(1, 100, 250, seed=2, dtype=dtype)
        y[:250] = small
        if how in ("shl", "shr"):
            y = integers(0, bits, 500, seed=3, dtype=dtype)
        y[y == 0] = 1
        want = {
            "add": lambda: x + y, "mul": lambda: x * y, "shl": lambda: x << y, "shr": lambda: x >> y,
            "floordiv": lambda: torch.div(x, y, rounding_mode="trunc"), "mod": lambda: torch.fmod(x, y),
        }[how]()  # fmt: skip
        got = _run_two(how, x, y)
        return "" if torch.equal(got, want) else f"{int((got != want).sum())} of 500 differ: {differs(got, want)}"

    return run


for _how in ("add", "mul", "floordiv", "mod", "shl", "shr"):
    for _dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        check(f"integers {_how} {str(_dtype)[6:]}")(_integer_check(_how, _dtype))


# ------------------------------------------------------------------------------------------------------ casts


@triton.jit
def _cast(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n).to(y.dtype.element_ty), mask=at < n)


FLOATS8 = {"gfx942": (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), "gfx950": (torch.float8_e4m3fn, torch.float8_e5m2)}


@check("all codes of 8-bit floats widen exactly")
def _widen(arch: str) -> str:
    for small in FLOATS8[arch]:
        x = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(small)
        for wide in (torch.float32, torch.bfloat16, torch.float16):
            y = torch.empty(256, dtype=wide)
            _cast[(1,)](x, y, 256, BLOCK=256)
            if said := differs(y, x.float().to(wide)):
                return f"{small} to {wide}: {said}"
    return ""


@check("floats narrow to 8 bits, half to even, within the range")
def _narrow(arch: str) -> str:
    for small in FLOATS8[arch]:
        x = (drawn(1000) * 8).clamp(-200, 200)
        ladder = torch.arange(128, dtype=torch.int32).to(torch.uint8).view(small).float()
        ladder = ladder[ladder.isfinite()]
        x = torch.cat([x, ladder, (ladder[1:] + ladder[:-1]) / 2])
        for wide in (torch.float32, torch.bfloat16):
            source = x.to(wide)
            y = torch.empty(len(x), dtype=small)
            _cast[(triton.cdiv(len(x), 256),)](source, y, len(x), BLOCK=256)
            if said := differs(y.float(), source.float().to(small).float()):
                return f"{wide} to {small}: {said}"
    return ""


@check("floats beyond 8 bits' range saturate")
def _saturate(arch: str) -> str:
    for small in FLOATS8[arch]:
        x = torch.tensor([1e6, -1e6, 7e4, 500.0, -500.0, 3e38])
        y = torch.empty(len(x), dtype=small)
        _cast[(1,)](x, y, len(x), BLOCK=64)
        largest = torch.finfo(small).max
        if said := differs(y.float(), x.clamp(-largest, largest).to(small).float()):
            return f"{small}: {said}"
    return ""


def _cast_check(source: torch.dtype, target: torch.dtype) -> Callable[[str], str]:
    def run(arch: str) -> str:
        x = (drawn(1000) * 100).to(source)
        y = torch.empty(1000, dtype=target)
        _cast[(4,)](x, y, 1000, BLOCK=256)
        return differs(y, x.to(target))

    return run


for _source, _target in [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32),
                         (torch.float16, torch.float32), (torch.float16, torch.bfloat16), (torch.float32, torch.int32),
                         (torch.int32, torch.float32), (torch.int64, torch.float32), (torch.float32, torch.int64),
                         (torch.int8, torch.float16), (torch.float64, torch.float32), (torch.float32, torch.float64),
                         (torch.int16, torch.bfloat16), (torch.int32, torch.int64), (torch.int64, torch.int32)]:  # fmt: skip
    check(f"cast {str(_source)[6:]} to {str(_target)[6:]}")(_cast_check(_source, _target))


@check("ties and specials to bfloat16")
def _ties(arch: str) -> str:
    codes = torch.tensor(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x00008000, 0x00018000, 1],
        dtype=torch.int32,
    )
    x = codes.view(torch.float32)
    y = torch.empty(len(x), dtype=torch.bfloat16)
    _cast[(1,)](x, y, len(x), BLOCK=64)
    return differs(y, x.to(torch.bfloat16))


# ------------------------------------------------------------------------------------------------------ reductions


@triton.jit
def _reduce(x, y, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, HOW: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    a = tl.load(x + rows[:, None] * N + columns[None, :])
    if HOW == "sum":
        r = tl.sum(a, AXIS)
    elif HOW == "max":
        r = tl.max(a, AXIS)
    elif HOW == "min":
        r = tl.min(a, AXIS)
    elif HOW == "argmax":
        r = tl.argmax(a, AXIS)
    elif HOW == "xor":
        r = tl.xor_sum(a, AXIS)
    else:
        r = tl.argmin(a, AXIS)
    if AXIS == 0:
        tl.store(y + columns, r)
    else:
        tl.store(y + rows, r)


def _reduce_check(how: str, axis: int, warps: int) -> Callable[[str], str]:
    def run(arch: str) -> str:
        for m, n in ((32, 64), (4, 128), (128, 16)):
            x = integers(-1000, 1000, m, n)
            want = {
                "sum": lambda x: x.sum(axis),
                "max": lambda x: x.amax(axis),
                "min": lambda x: x.amin(axis),
                "argmax": lambda x: x.argmax(axis),
                "argmin": lambda x: x.argmin(axis),
                "xor": lambda x: _xor(x, axis),
            }[how](x)
            y = torch.empty(want.shape, dtype=torch.int32)
            _reduce[(1,)](x, y, M=m, N=n, AXIS=axis, HOW=how, num_warps=warps)
            values = x.gather(axis, y.long().unsqueeze(axis)).squeeze(axis) if how.startswith("arg") else y
            right = x.gather(axis, want.unsqueeze(axis)).squeeze(axis) if how.startswith("arg") else want
            if said := differs(values, right):
                return f"{m}x{n}: {said}"
        return ""

    return run


def _xor(x: torch.Tensor, axis: int) -> torch.Tensor:
    result = torch.zeros(x.shape[1 - axis], dtype=x.dtype)
    for part in x.unbind(axis):
        result = result ^ part
    return result


for _how in ("sum", "max", "argmax", "argmin", "xor"):
    for _axis in (0, 1):
        for _warps in WARPS if _how == "sum" else (4,):
            check(f"reduce {_how} axis {_axis}, {_warps} warps")(_reduce_check(_how, _axis, _warps))


@triton.jit
def _softmax(x, y, N: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, N)
    a = tl.load(x + row * N + columns)
    e = tl.exp(a - tl.max(a, 0))
    tl.store(y + row * N + columns, e / tl.sum(e, 0))


@check("softmax of rows")
def _softmax_check(arch: str) -> str:
    x = drawn(8, 512) * 5
    y = torch.empty_like(x)
    _softmax[(8,)](x, y, N=512)
    return differs(y, torch.softmax(x.double(), -1).float(), 6e-6)


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _scan(x, y, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr, HOW: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x + at)
    if HOW == "cumsum":  # noqa: SIM108  resolved when compiled
        r = tl.cumsum(a, AXIS, reverse=REVERSE)
    else:
        r = tl.associative_scan(a, AXIS, _plus, reverse=REVERSE)
    tl.store(y + at, r)


@check("scans along both axes, both ways")
def _scans(arch: str) -> str:
    x = integers(-100, 100, 32, 64)
    for axis in (0, 1):
        for reverse in (False, True):
            for how in ("cumsum", "associative"):
                for warps in (1, 4):
                    y = torch.empty_like(x)
                    _scan[(1,)](x, y, M=32, N=64, AXIS=axis, REVERSE=reverse, HOW=how, num_warps=warps)
                    want = x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)
                    if said := differs(y, want):
                        return f"{how}, axis {axis}, reverse {reverse}, {warps} warps: {said}"
    return ""


# ------------------------------------------------------------------------------------------------------ movement


@triton.jit
def _transpose(x, y, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    a = tl.load(x + rows[:, None] * N + columns[None, :])
    tl.store(y + columns[:, None] * M + rows[None, :], tl.trans(a))


@check("transposes of every width")
def _transposes(arch: str) -> str:
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        for m, n in ((32, 64), (64, 16)):
            for warps in (1, 4):
                x = integers(-100, 100, m, n, dtype=dtype)
                y = torch.empty(n, m, dtype=dtype)
                _transpose[(1,)](x, y, M=m, N=n, num_warps=warps)
                if said := differs(y, x.T):
                    return f"{dtype} {m}x{n}: {said}"
    return ""


@triton.jit
def _gather(x, index, y, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y + at, tl.gather(tl.load(x + at), tl.load(index + at), AXIS))


@check("gathers within a tensor")
def _gathers(arch: str) -> str:
    x = drawn(32, 64)
    for axis, size in ((0, 32), (1, 64)):
        index = integers(0, size, 32, 64)
        y = torch.empty_like(x)
        _gather[(1,)](x, index, y, M=32, N=64, AXIS=axis)
        if said := differs(y, x.gather(axis, index.long())):
            return f"axis {axis}: {said}"
    return ""


@triton.jit
def _shapes(x, y, z, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, N))
    first, second = tl.split(tl.reshape(a, (N // 2, 2)))
    tl.store(y + tl.arange(0, N), tl.interleave(second, first))
    cube = tl.permute(tl.reshape(a, (4, N // 16, 4)), (2, 0, 1))
    tl.store(z + tl.arange(0, N), tl.reshape(cube, (N,)))


@check("reshape, split, interleave and permute")
def _shape_check(arch: str) -> str:
    x = drawn(256)
    y, z = torch.empty_like(x), torch.empty_like(x)
    _shapes[(1,)](x, y, z, N=256)
    return differs(y, x.view(-1, 2).flip(1).reshape(-1)) or differs(z, x.view(4, 16, 4).permute(2, 0, 1).reshape(-1))


@triton.jit
def _sort(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.sort(tl.load(x + at)))


@check("sort")
def _sorted(arch: str) -> str:
    x = drawn(256)
    y = torch.empty_like(x)
    _sort[(1,)](x, y, N=256)
    return differs(y, x.sort().values)


@triton.jit
def _histogram(x, y, N: tl.constexpr, BINS: tl.constexpr):
    tl.store(y + tl.arange(0, BINS), tl.histogram(tl.load(x + tl.arange(0, N)), BINS))


@check("histogram")
def _histograms(arch: str) -> str:
    x = integers(0, 64, 512)
    y = torch.empty(64, dtype=torch.int32)
    _histogram[(1,)](x, y, N=512, BINS=64)
    return differs(y, torch.bincount(x, minlength=64))


@triton.jit
def _strided(x, y, rows, columns, stride_r, stride_c, BLOCK: tl.constexpr):
    r, c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (r[:, None] < rows) & (c[None, :] < columns)
    a = tl.load(x + r[:, None] * stride_r + c[None, :] * stride_c, mask=mask, other=-7)
    tl.store(y + r[:, None] * columns + c[None, :], a, mask=mask)


@check("masked strided copies of odd sizes")
def _strides(arch: str) -> str:
    for dtype in (torch.int8, torch.int16, torch.float32, torch.bfloat16, torch.int64):
        x = integers(-100, 100, 37, 53).to(dtype).T
        y = torch.full((53, 37), -9, dtype=dtype)
        _strided[(3, 4)](x, y, 53, 37, x.stride(0), x.stride(1), BLOCK=16)
        if said := differs(y, x):
            return f"{dtype}: {said}"
    return ""


# ------------------------------------------------------------------------------------------------------ control flow


@triton.jit
def _collatz(x, y, n):
    at = tl.program_id(0)
    a = tl.load(x + at)
    steps = 0
    while a != 1:
        if a % 2 == 0:  # noqa: SIM108  a branch is what is asked
            a = a // 2
        else:
            a = 3 * a + 1
        steps += 1
    tl.store(y + at, steps)


@check("while loops and branches")
def _loops(arch: str) -> str:
    x = torch.arange(1, 33, dtype=torch.int32)
    y = torch.empty_like(x)
    _collatz[(32,)](x, y, 32)

    def steps(number: int) -> int:
        count = 0
        while number != 1:
            number, count = (number // 2 if number % 2 == 0 else 3 * number + 1), count + 1
        return count

    return differs(y, torch.tensor([steps(int(n)) for n in x]))


@triton.jit
def _loop_sum(x, y, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + at, mask=at < n, other=0)
    tl.store(y, tl.sum(total, 0))


@check("a loop over blocks with a ragged end")
def _loop_check(arch: str) -> str:
    for n in (1, 63, 64, 1000):
        x = integers(-50, 50, n).float()
        y = torch.empty(1)
        _loop_sum[(1,)](x, y, n, BLOCK=64)
        if said := differs(y, x.sum()[None]):
            return f"{n}: {said}"
    return ""


@triton.jit
def _grid(y):
    a, b, c = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (c * tl.num_programs(1) + b) * tl.num_programs(0) + a
    tl.store(y + at, a + 10 * b + 100 * c)


@check("three axes of programs")
def _grids(arch: str) -> str:
    y = torch.full((4, 3, 2), -1, dtype=torch.int32)
    _grid[(2, 3, 4)](y)
    a, b, c = torch.arange(2), torch.arange(3), torch.arange(4)
    return differs(y, (c[:, None, None] * 100 + b[None, :, None] * 10 + a[None, None, :]).int())


# ------------------------------------------------------------------------------------------------------ atomics


@triton.jit
def _atomics(x, y, old, N: tl.constexpr, HOW: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(x + at)
    if HOW == "add":
        r = tl.atomic_add(y + at % 16, a)
    elif HOW == "max":
        r = tl.atomic_max(y + at % 16, a)
    elif HOW == "min":
        r = tl.atomic_min(y + at % 16, a)
    elif HOW == "and":
        r = tl.atomic_and(y + at % 16, a)
    elif HOW == "or":
        r = tl.atomic_or(y + at % 16, a)
    elif HOW == "xor":
        r = tl.atomic_xor(y + at % 16, a)
    elif HOW == "xchg":
        r = tl.atomic_xchg(y + at, a)
    else:
        r = tl.atomic_cas(y + at, a, a + 1)
    tl.store(old + at, r)


def _atomic_check(how: str, dtype: torch.dtype) -> Callable[[str], str]:
    def run(arch: str) -> str:
        n = 128
        # Sums of these are exact in every type, in any order.
        x, y = (integers(-100, 100, n, seed=seed).to(dtype) for seed in (0, 1))
        if how == "cas":
            x[::2] = y[::2]
        before, old = y.clone(), torch.empty(n, dtype=dtype)
        _atomics[(1,)](x, y, old, N=n, HOW=how)
        groups = x.view(-1, 16)
        head = before[:16]
        if how == "add":
            want = head + groups.sum(0)
        elif how in ("max", "min"):
            want = torch.maximum(head, groups.amax(0)) if how == "max" else torch.minimum(head, groups.amin(0))
        elif how == "xchg":
            return differs(y, x) or differs(old, before)
        elif how == "cas":
            return differs(y, torch.where(before == x, x + 1, before)) or differs(old, before)
        else:
            want = head.clone()
            for row in groups:
                want = {"and": want & row, "or": want | row, "xor": want ^ row}[how]
        return differs(y[:16], want) or differs(y[16:], before[16:])

    return run


_ATOMIC = ("add", "max", "min", "and", "or", "xor", "xchg", "cas")
for _how, _dtype in [
    *((how, dtype) for how in _ATOMIC for dtype in (torch.int32, torch.int64)),
    *(("add", dtype) for dtype in (torch.float16, torch.float32, torch.float64)),
    *((how, torch.float32) for how in ("max", "min")),
]:
    check(f"atomic {_how} {str(_dtype)[6:]}")(_atomic_check(_how, _dtype))


@triton.jit
def _ticket(counter, y):
    tl.store(y + tl.program_id(0), tl.atomic_add(counter, 1))


@check("programs draw tickets from one counter")
def _tickets(arch: str) -> str:
    counter, y = torch.zeros(1, dtype=torch.int32), torch.full((20,), -1, dtype=torch.int32)
    _ticket[(20,)](counter, y)
    return differs(y.sort().values, torch.arange(20)) or differs(counter, torch.tensor([20]))


# ------------------------------------------------------------------------------------------------------ products


@triton.jit
def _dot(a, b, c, K, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK)
    total = tl.zeros((M, N), c.dtype.element_ty)
    for start in range(0, K, BLOCK):
        x = tl.load(a + m[:, None] * K + start + k[None, :])
        y = tl.load(b + (start + k[:, None]) * N + n[None, :])
        total = tl.dot(x, y, total, input_precision=PRECISION, out_dtype=c.dtype.element_ty)
    tl.store(c + m[:, None] * N + n[None, :], total)


def _product(dtype: torch.dtype, m: int, n: int, k: int, block: int, precision: str = "ieee", **options: Any) -> str:
    """Of whole numbers, exact in any order; then of real ones, within a bound."""
    result = {torch.int8: torch.int32, torch.float64: torch.float64}.get(dtype, torch.float32)
    for exact in (True, False):
        a, b = (
            (integers(-4, 5, *size, seed=s).float() if exact else drawn(*size, seed=s))
            for s, size in ((0, (m, k)), (1, (k, n)))
        )
        if dtype == torch.int8:
            a, b = (integers(-128, 128, *size, seed=s) for s, size in ((0, (m, k)), (1, (k, n))))
        x, y = a.to(dtype), b.to(dtype)
        c = torch.empty(m, n, dtype=result)
        _dot[(1,)](x, y, c, k, M=m, N=n, BLOCK=block, PRECISION=precision, **options)
        want = x.double() @ y.double()
        scale = 0.0 if exact or dtype == torch.int8 else float((x.double().abs() @ y.double().abs()).max())
        if said := differs(c, want, 0, scale * (2e-3 if precision == "tf32" else 2e-7 * math.sqrt(k))):
            return f"{'exact' if exact else 'real'}: {said}"
    return ""


_SHAPES = [(16, 16, 32, 32), (32, 32, 64, 32), (64, 64, 64, 64), (128, 64, 64, 32)]
_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float64]
for _dtype in _DTYPES:
    for _m, _n, _k, _block in _SHAPES:
        for _warps in (1, 4, 8):
            if (_m == 16 and _warps > 1) or (_dtype == torch.float64 and _m > 32) or (_m == 128 and _warps == 1):
                continue

            def _run(
                arch: str, d: torch.dtype = _dtype, size: tuple[int, ...] = (_m, _n, _k, _block), w: int = _warps
            ) -> str:
                return _product(d, *size, num_warps=w)

            check(f"dot {str(_dtype)[6:]} {_m}x{_n}x{_k}, {_warps} warps")(_run)
for _dtype in (torch.float16, torch.bfloat16, torch.int8):
    for _m, _n in ((1, 16), (4, 4), (8, 2)):

        def _run_small(arch: str, d: torch.dtype = _dtype, m: int = _m, n: int = _n) -> str:
            return _product(d, m, n, 64, 32, num_warps=1)

        check(f"dot {str(_dtype)[6:]} {_m}x{_n}x64, too small for the matrix cores")(_run_small)
for _nonk in (16, 32):
    for _dtype in (torch.float16, torch.bfloat16, torch.int8):

        def _run_nonk(arch: str, d: torch.dtype = _dtype, nonk: int = _nonk) -> str:
            return _product(d, 64, 64, 128, 64, num_warps=4, matrix_instr_nonkdim=nonk)

        check(f"dot {str(_dtype)[6:]}, instructions of {_nonk} rows")(_run_nonk)
for _stages in (1, 2, 3):

    def _run_stages(arch: str, stages: int = _stages) -> str:
        return _product(torch.bfloat16, 64, 64, 256, 32, num_warps=4, num_stages=stages)

    check(f"dot in a pipeline of {_stages} stages")(_run_stages)


@check("dot float32 as tf32")
def _tf32(arch: str) -> str:
    return _product(torch.float32, 32, 32, 64, 32, "tf32") if arch == "gfx942" else ""


@check("dot of 8-bit floats, all pairs of formats")
def _dot8(arch: str) -> str:
    for first in FLOATS8[arch]:
        for second in FLOATS8[arch]:
            for m, n, k, block, warps in (
                (16, 16, 64, 64, 1),
                (32, 32, 64, 32, 1),
                (64, 64, 128, 64, 4),
                (64, 32, 128, 128, 2),
            ):
                a, b = integers(-4, 5, m, k).float().to(first), integers(-4, 5, k, n, seed=1).float().to(second)
                c = torch.empty(m, n)
                _dot[(1,)](a, b, c, k, M=m, N=n, BLOCK=block, PRECISION="ieee", num_warps=warps)
                if said := differs(c, a.double() @ b.double()):
                    return f"{first} x {second}, {m}x{n}x{k}: {said}"
    return ""


@triton.jit
def _dot_scaled(
    a,
    sa,
    b,
    sb,
    c,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FA: tl.constexpr,
    FB: tl.constexpr,
    PA: tl.constexpr,
    PB: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
):
    m, n, g = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 32)
    ka, kb = tl.arange(0, K // PA), tl.arange(0, K // PB)
    x = tl.load(a + m[:, None] * (K // PA) + ka[None, :])
    y = tl.load(b + kb[:, None] * N + n[None, :])
    u = tl.load(sa + m[:, None] * (K // 32) + g[None, :]) if HAS_A else None
    v = tl.load(sb + n[:, None] * (K // 32) + g[None, :]) if HAS_B else None
    tl.store(c + m[:, None] * N + n[None, :], tl.dot_scaled(x, u, FA, y, v, FB))


_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _scaled_operand(kind: str, rows: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers [rows, k], what is stored: [rows, k] bytes, or pairs of four bits along k)."""
    if kind == "e2m1":
        codes = integers(0, 16, rows, k, seed=seed)
        return _FP4[codes], (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "fp16": torch.float16}[
        kind
    ]
    x = integers(-6, 7, rows, k, seed=seed).float().to(dtype)
    return x.float(), x.view(torch.uint8) if dtype.itemsize == 1 else x


def _scaled_check(first: str, second: str, m: int, n: int, k: int, warps: int, scales: tuple[bool, bool]) -> str:
    a, stored_a = _scaled_operand(first, m, k, 2)
    b, stored_b = _scaled_operand(second, n, k, 3)
    sa, sb = (integers(124, 131, rows, k // 32, seed=s).to(torch.uint8) for rows, s in ((m, 4), (n, 5)))
    c = torch.empty(m, n)
    stored_b = stored_b.T.contiguous()
    packs = [2 if kind == "e2m1" else 1 for kind in (first, second)]
    _dot_scaled[(1,)](
        stored_a,
        sa,
        stored_b,
        sb,
        c,
        M=m,
        N=n,
        K=k,
        FA=first,
        FB=second,
        PA=packs[0],
        PB=packs[1],
        HAS_A=scales[0],
        HAS_B=scales[1],
        num_warps=warps,
    )
    x = a.double() * (torch.exp2(sa.double() - 127).repeat_interleave(32, 1) if scales[0] else 1)
    y = b.double() * (torch.exp2(sb.double() - 127).repeat_interleave(32, 1) if scales[1] else 1)
    return differs(c, x @ y.T, 1e-6)


for _first, _second in [
    ("e4m3", "e4m3"),
    ("e5m2", "e5m2"),
    ("e2m1", "e2m1"),
    ("e4m3", "e2m1"),
    ("e2m1", "e5m2"),
    ("e4m3", "e5m2"),
    ("bf16", "e2m1"),
    ("e4m3", "bf16"),
]:

    def _run_scaled(arch: str, pair: tuple[str, str] = (_first, _second)) -> str:
        scales = (pair[0] != "bf16", pair[1] != "bf16")
        for size in ((32, 32, 128, 1), (64, 64, 128, 4), (128, 32, 256, 4)):
            if said := _scaled_check(*pair, *size[:3], size[3], scales):
                return f"{size}: {said}"
        return ""

    check(f"dot_scaled {_first} x {_second}")(_run_scaled)


@triton.jit
def _attention(q, k, v, o, N, D: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr):
    m, d, n = tl.arange(0, M), tl.arange(0, D), tl.arange(0, BLOCK)
    x = tl.load(q + m[:, None] * D + d[None, :])
    best, total = tl.full((M,), -float("inf"), tl.float32), tl.zeros((M,), tl.float32)
    result = tl.zeros((M, D), tl.float32)
    for start in range(0, N, BLOCK):
        inside = start + n < N
        y = tl.load(k + (start + n[None, :]) * D + d[:, None], mask=inside[None, :], other=0)
        s = tl.where(inside[None, :], tl.dot(x, y) * 0.125, -float("inf"))
        new = tl.maximum(best, tl.max(s, 1))
        p = tl.exp2((s - new[:, None]) * 1.44269504)
        keep = tl.exp2((best - new) * 1.44269504)
        total = total * keep + tl.sum(p, 1)
        z = tl.load(v + (start + n[:, None]) * D + d[None, :], mask=inside[:, None], other=0)
        result = result * keep[:, None] + tl.dot(p.to(z.dtype), z)
        best = new
    tl.store(o + m[:, None] * D + d[None, :], result / total[:, None])


@check("flash attention of a ragged length")
def _attention_check(arch: str) -> str:
    for warps, m in ((1, 16), (4, 64)):
        q, k, v = (drawn(rows, 64, seed=s, dtype=torch.bfloat16) for rows, s in ((m, 0), (150, 1), (150, 2)))
        o = torch.empty(m, 64)
        _attention[(1,)](q, k, v, o, 150, D=64, M=m, BLOCK=32, num_warps=warps)
        want = torch.softmax(q.double() @ k.double().T * 0.125, -1) @ v.double()
        if said := differs(o, want, 0, 0.01):
            return f"{warps} warps: {said}"
    return ""


def results(arch: str, only: str) -> Iterator[tuple[str, str]]:
    """Runs the checks whose name holds `only`."""
    for name, function in CHECKS.items():
        if only not in name:
            continue
        try:
            yield name, function(arch)
        except Exception as fault:
            yield name, f"{type(fault).__name__}: {fault} at {traceback.extract_tb(fault.__traceback__)[-1].name}"


def main() -> None:
    from impl.executions.isa.triton_launch import install

    install(sys.argv[1])
    for name, said in results(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""):
        sys.stdout.write(json.dumps([name, said]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
