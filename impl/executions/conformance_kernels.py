"""What does a Triton kernel have to compute, checked against torch, NumPy and integer arithmetic?

Each check runs a small kernel and compares it with an expectation that shares no code with the interpreter's repair.
Imported only by ``impl.executions.conformance``, in a process started with ``TRITON_INTERPRET=1``.
"""

# Kernels have no types that mypy knows, and it cannot infer those of lambdas that bind a loop's values.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

NAN, INF = math.nan, math.inf

TYPES: dict[str, tuple[torch.dtype, Any]] = {
    "fp32": (torch.float32, tl.float32),
    "fp16": (torch.float16, tl.float16),
    "bf16": (torch.bfloat16, tl.bfloat16),
    "e4m3fn": (torch.float8_e4m3fn, tl.float8e4nv),
    "e4m3fnuz": (torch.float8_e4m3fnuz, tl.float8e4b8),
    "e5m2": (torch.float8_e5m2, tl.float8e5),
    "e5m2fnuz": (torch.float8_e5m2fnuz, tl.float8e5b16),
    "int32": (torch.int32, tl.int32),
    "int8": (torch.int8, tl.int8),
    "uint8": (torch.uint8, tl.uint8),
    "int64": (torch.int64, tl.int64),
}
FP8 = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")


@dataclasses.dataclass(frozen=True)
class Check:
    """One row: its name, what it checks, and the question, answered by nothing or by what went wrong."""

    name: str
    checks: str
    wrong: Callable[[], str]

    def verdict(self) -> tuple[str, str]:
        """``right``, ``wrong`` with the first difference, or ``raises`` with the error."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                note = self.wrong()
            except Exception as error:
                return "raises", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
        return ("wrong", note[:160]) if note else ("right", "")


def _differs(got: torch.Tensor, want: torch.Tensor, sign_of_zero: bool = True) -> str:
    """Nothing if equal bit for bit, NaNs being equal; else the first difference and the number of them."""
    x, y = got.double().flatten(), want.double().flatten()
    same = (x == y) | (x.isnan() & y.isnan())
    if sign_of_zero:
        same &= x.isnan() | (x.signbit() == y.signbit())
    if same.all():
        return ""
    at = int((~same).nonzero()[0])
    return f"[{at}]={x[at].item():.9g}, should be {y[at].item():.9g}; {int((~same).sum())} of {x.numel()} differ"


def _far(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> str:
    """Nothing if every |got - want| is within ``bound`` and NaNs and infinities agree."""
    x, y = got.double(), want.double()
    finite = y.isfinite()
    close = torch.where(finite, (x - y).abs() <= bound, (x == y) | (x.isnan() & y.isnan()))
    if close.all():
        return ""
    at = tuple(int(i) for i in (~close).nonzero()[0])
    return f"{list(at)}={x[at].item():.6g}, should be {y[at].item():.6g}; {int((~close).sum())} of {x.numel()} are off"


def _numbers(count: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Normal-like float32 numbers made of integers, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randint(-1000, 1001, (8, count), generator=generator)
    return parts.sum(0).float() * (scale / 1634.0)


# ---- casts


@triton.jit
def cast_kernel(source, out, N: tl.constexpr, TO: tl.constexpr, ROUNDING: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(out + lanes, tl.load(source + lanes).to(TO, fp_downcast_rounding=ROUNDING))


def _cast(values: torch.Tensor, to: str, rounding: str | None = None) -> torch.Tensor:
    out = torch.zeros(values.shape, dtype=TYPES[to][0])
    cast_kernel[(1,)](values, out, values.numel(), TYPES[to][1], rounding)
    return out


def _codes(name: str) -> torch.Tensor:
    """Every code of a packed format."""
    if name in ("bf16", "fp16"):
        return torch.arange(-32768, 32768, dtype=torch.int16).view(TYPES[name][0])
    return torch.arange(256, dtype=torch.uint8).view(TYPES[name][0])


def _grid(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The finite non-negative values of a format in order, and their codes."""
    codes = _codes(name)
    values = codes.double().numpy()
    raw = codes.view(torch.uint8 if codes.element_size() == 1 else torch.int16).numpy().astype(np.int64)
    keep = np.isfinite(values) & ~np.signbit(values)
    order = np.argsort(values[keep], kind="stable")
    return values[keep][order], raw[keep][order] & 0xFFFF


def _nearest(values: torch.Tensor, name: str) -> torch.Tensor:
    """Rounding by search: the nearest value of the format, the even code on a tie, clamped at its largest."""
    grid, codes = _grid(name)
    x = values.double().numpy()
    magnitude = np.minimum(np.abs(x), grid[-1])
    above = np.clip(np.searchsorted(grid, np.nan_to_num(magnitude)), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    down, up = magnitude - low, high - magnitude
    take_high = (up < down) | ((up == down) & (codes[above] % 2 == 0))
    result = np.where(take_high, high, low)
    signed = np.copysign(result, x)
    if name.endswith("fnuz"):
        signed = np.where(result == 0, 0.0, signed)
    return torch.from_numpy(np.where(np.isnan(x), np.nan, signed))


def _boundaries(name: str) -> torch.Tensor:
    """Every value of a format, every midpoint between neighbours and the float32 numbers next to those; both signs."""
    grid, _ = _grid(name)
    middles = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    points = [
        grid.astype(np.float32),
        middles,
        np.nextafter(middles, np.float32(0)),
        np.nextafter(middles, np.float32(INF)),
    ]
    positive = np.concatenate(points)
    return _padded(torch.from_numpy(np.concatenate([positive, -positive])))


def _padded(values: torch.Tensor) -> torch.Tensor:
    size = 1 << max(4, (values.numel() - 1).bit_length())
    return torch.cat([values, values[:1].expand(size - values.numel())])


def _random_bits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def _downcast(values: torch.Tensor, to: str) -> str:
    got = _cast(values, to)
    if to in FP8:
        return _differs(got, _nearest(values, to))
    return _differs(got, values.to(TYPES[to][0]))


def _infinity(to: str) -> torch.Tensor:
    if to in ("bf16", "fp16", "e5m2"):
        return torch.tensor([INF, -INF] * 8)
    largest = torch.finfo(TYPES[to][0]).max
    return torch.tensor([largest, -largest] * 8)


def _truncated(values: torch.Tensor, to: str) -> torch.Tensor:
    grid, _ = _grid(to)
    x = values.double().numpy()
    at = np.searchsorted(grid, np.abs(x), side="right") - 1
    return torch.from_numpy(np.copysign(grid[at], x))


def _casts() -> list[Check]:
    rows = []
    for source in FP8:
        for to in ("fp32", "bf16", "fp16"):

            def upcast(source: str = source, to: str = to) -> str:
                return _differs(_cast(_codes(source), to), _codes(source).to(TYPES[to][0]))

            rows.append(Check(f"{source} to {to}", "all 256 codes, against torch", upcast))
    rows.append(
        Check(
            "bf16 to fp32",
            "all 65,536 codes, against torch",
            lambda: _differs(_cast(_codes("bf16"), "fp32"), _codes("bf16").float()),
        )
    )
    rows.append(
        Check(
            "bf16 to fp16",
            "all 65,536 codes, against torch",
            lambda: _differs(_cast(_codes("bf16"), "fp16"), _codes("bf16").half()),
        )
    )
    rows.append(
        Check(
            "fp16 to bf16",
            "all 65,536 codes, against torch",
            lambda: _differs(_cast(_codes("fp16"), "bf16"), _codes("fp16").bfloat16()),
        )
    )
    for to in FP8:

        def from_bf16(to: str = to) -> str:
            values = _codes("bf16")
            finite = torch.where(values.float().isfinite(), values, torch.zeros_like(values))
            return _differs(_cast(finite, to), _nearest(finite.float(), to))

        rows.append(Check(f"bf16 to {to}", "all 65,280 finite codes, by search for the nearest value", from_bf16))
    for to in ("bf16", "fp16", *FP8):
        sets: list[tuple[str, str, Callable[[], torch.Tensor]]] = [
            ("ties", "every value, every midpoint and its float32 neighbours", lambda to=to: _boundaries(to)),
            ("random bits", "65,536 finite bit patterns", lambda: torch.nan_to_num(_random_bits())),
            (
                "subnormals",
                "multiples of a hundredth of the smallest code",
                lambda to=to: torch.arange(-2048, 2048).float() * float(_grid(to)[0][1]) * 0.01,
            ),
            ("zeros", "+0 and -0", lambda: torch.tensor([0.0, -0.0] * 8)),
            ("NaN", "stays NaN", lambda: torch.full((16,), NAN)),
        ]
        for what, checks, make in sets:
            rows.append(Check(f"fp32 to {to}: {what}", checks, lambda make=make, to=to: _downcast(make(), to)))
        if to in FP8:

            def overflow(to: str = to) -> str:
                values = _numbers(1024).abs() * 1e4 + torch.finfo(TYPES[to][0]).max * 1.01
                return _downcast(torch.cat([values, -values]), to)

            rows.append(Check(f"fp32 to {to}: overflow", "finite values clamp to the largest code", overflow))
        rows.append(
            Check(
                f"fp32 to {to}: infinity",
                "stays infinity if the format has one, else clamps (declared)",
                lambda to=to: _differs(_cast(torch.tensor([INF, -INF] * 8), to), _infinity(to)),
            )
        )
        if to in ("bf16", "fp16", "e4m3fn", "e5m2"):

            def toward_zero(to: str = to) -> str:
                return _differs(_cast(_boundaries(to), to, "rtz"), _truncated(_boundaries(to), to))

            rows.append(
                Check(f"fp32 to {to}: rounding toward zero", "every value, midpoint and neighbour", toward_zero)
            )
    integers = torch.arange(-32768, 32768, dtype=torch.int32) * 65537
    rows.append(
        Check(
            "int32 to bf16",
            "65,536 integers, through float32",
            lambda: _differs(_cast(integers, "bf16"), integers.float().bfloat16()),
        )
    )
    rows.append(Check("int32 to fp32", "65,536 integers", lambda: _differs(_cast(integers, "fp32"), integers.float())))
    rows.append(
        Check(
            "bf16 to int32",
            "values in range truncate",
            lambda: _differs(_cast(_numbers(1024, 100).bfloat16(), "int32"), _numbers(1024, 100).bfloat16().int()),
        )
    )
    extremes = torch.tensor([1.9, -1.9, 3e9, -3e9, NAN, INF, -INF, 0.0])
    rows.append(
        Check(
            "fp32 to int32: out of range",
            "saturates; NaN gives 0",
            lambda: _differs(
                _cast(extremes, "int32"), torch.tensor([1, -1, 2**31 - 1, -(2**31), 0, 2**31 - 1, -(2**31), 0])
            ),
        )
    )
    rows.append(
        Check(
            "fp32 to uint8: out of range",
            "saturates; NaN gives 0",
            lambda: _differs(_cast(extremes, "uint8"), torch.tensor([1, 0, 255, 0, 0, 255, 0, 0])),
        )
    )
    rows.append(Check("int32 to int8", "wraps", lambda: _differs(_cast(integers, "int8"), integers.to(torch.int8))))
    return rows


# ---- arithmetic


@triton.jit
def binary_kernel(a, b, out, N: tl.constexpr, OP: tl.constexpr):
    lanes = tl.arange(0, N)
    x = tl.load(a + lanes)
    y = tl.load(b + lanes)
    if OP == "add":
        r = x + y
    elif OP == "sub":
        r = x - y
    elif OP == "mul":
        r = x * y
    elif OP == "div":
        r = x / y
    elif OP == "maximum":
        r = tl.maximum(x, y)
    elif OP == "minimum":
        r = tl.minimum(x, y)
    elif OP == "maximum_all":
        r = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "minimum_all":
        r = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "clamp":
        r = tl.clamp(x, -1.0, 1.0)
    elif OP == "less":
        r = (x < y).to(tl.int32)
    elif OP == "equal":
        r = (x == y).to(tl.int32)
    elif OP == "count":
        r = (x < y).to(tl.int32) + (x > y).to(tl.int32) + (x <= y).to(tl.int32) + (x != y).to(tl.int32)
    elif OP == "scrub":
        r = tl.where(x == x, x, 0.0)
    elif OP == "choose":
        r = tl.where(x < y, x, y)
    elif OP == "predicate":
        less = x < y
        r = tl.where(less ^ (y < x), 1, 0)
    elif OP == "floordiv":
        r = x // y
    elif OP == "mod":
        r = x % y
    elif OP == "shr":
        r = x >> y
    elif OP == "umulhi":
        r = tl.umulhi(x.to(tl.uint32, bitcast=True), y.to(tl.uint32, bitcast=True))
    elif OP == "fma":
        r = tl.fma(x, y, -x)
    elif OP == "scaled":
        r = x * 2.5
    tl.store(out + lanes, r)


def _binary(op: str, x: torch.Tensor, y: torch.Tensor, out: torch.dtype | None = None) -> torch.Tensor:
    result = torch.zeros(x.shape, dtype=out or x.dtype)
    binary_kernel[(1,)](x, y, result, x.numel(), op)
    return result


_SPECIAL_X = torch.tensor([NAN, 1.0, NAN, INF, -INF, 2.0, 0.0, -3.0])
_SPECIAL_Y = torch.tensor([1.0, NAN, NAN, NAN, 1.0, 3.0, 5.0, -INF])


def _exact_fma(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x * y - x rounded once, through Python's exact rationals."""
    from fractions import Fraction

    def once(a: float, b: float) -> float:
        exact = Fraction(a) * Fraction(b) - Fraction(a)
        near = np.float32(float(exact))
        around = [near, np.nextafter(near, np.float32(INF)), np.nextafter(near, np.float32(-INF))]
        return float(min(around, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) & 1)))

    return torch.tensor([once(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)])


def _fp8_products(name: str) -> str:
    values = _codes(name).float()
    small = torch.where(values.abs() <= 4, values, torch.ones_like(values))
    x, y = small.to(TYPES[name][0]), small.flip(0).to(TYPES[name][0])
    return _differs(_binary("mul", x, y), _nearest(x.float() * y.float(), name), sign_of_zero=False)


def _arithmetic() -> list[Check]:
    rows = []
    for name in ("fp32", "bf16", "fp16"):
        dtype = TYPES[name][0]
        x, y = _numbers(1024, 3.0, 1).to(dtype), _numbers(1024, 3.0, 2).to(dtype)
        y = torch.where(y == 0, torch.ones_like(y), y)
        u, v = _SPECIAL_X.to(dtype), _SPECIAL_Y.to(dtype)

        def row(what: str, checks: str, wrong: Callable[[], str], name: str = name) -> None:
            rows.append(Check(f"{name} {what}", checks, wrong))

        def same(
            op: str,
            want: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
            a: torch.Tensor = x,
            b: torch.Tensor = y,
            out: torch.dtype | None = None,
        ) -> Callable[[], str]:
            return lambda: _differs(_binary(op, a, b, out), want(a, b), sign_of_zero=False)

        row("x + y", "1,024 pairs, one rounding", same("add", torch.add))
        row("x - y", "1,024 pairs, one rounding", same("sub", torch.sub))
        row("x * y", "1,024 pairs, one rounding", same("mul", torch.mul))
        row("x / y", "1,024 pairs, one rounding", same("div", torch.div))
        row("x * 2.5", "a Python number takes the tensor's type", same("scaled", lambda a, b: a * 2.5))
        row("x < y", "1,024 pairs and specials", same("less", lambda a, b: (a < b).int(), x, y, torch.int32))
        row("x == y with NaN", "NaN equals nothing", same("equal", lambda a, b: (a == b).int(), u, u, torch.int32))
        row(
            "comparisons with NaN",
            "all ordered comparisons false, != true",
            same(
                "count", lambda a, b: (a < b).int() + (a > b).int() + (a <= b).int() + (a != b).int(), u, v, torch.int32
            ),
        )
        row("where(x == x, x, 0)", "scrubs NaN", same("scrub", lambda a, b: torch.where(a == a, a, 0), u, v))
        row("where(x < y, x, y)", "1,024 pairs", same("choose", lambda a, b: torch.where(a < b, a, b)))
        row(
            "predicates combine as one bit",
            "(x < y) ^ (y < x)",
            same("predicate", lambda a, b: (a != b).int(), x, y, torch.int32),
        )
        row("maximum", "1,024 pairs", same("maximum", torch.maximum))
        row("maximum with NaN", "the number wins", same("maximum", torch.fmax, u, v))
        row("minimum with NaN", "the number wins", same("minimum", torch.fmin, u, v))
        row("maximum propagating NaN", "NaN wins", same("maximum_all", torch.maximum, u, v))
        row("minimum propagating NaN", "NaN wins", same("minimum_all", torch.minimum, u, v))
        row("clamp", "1,024 values to [-1, 1]", same("clamp", lambda a, b: a.clamp(-1, 1)))
        row(
            "clamp with NaN",
            "NaN gives the lower bound",
            same("clamp", lambda a, b: torch.fmin(torch.fmax(a, torch.full_like(a, -1)), torch.full_like(a, 1)), u, v),
        )
    x, y = _numbers(1024, 3.0, 1), _numbers(1024, 3.0, 2)
    rows.append(
        Check(
            "fp32 fma",
            "x * y - x in one rounding, by exact rationals",
            lambda: _differs(_binary("fma", x, y), _exact_fma(x, y), sign_of_zero=False),
        )
    )
    rows.append(
        Check(
            "bf16 fma",
            "x * y - x in one rounding",
            lambda: _differs(
                _binary("fma", x.bfloat16(), y.bfloat16()),
                (x.bfloat16().double() * y.bfloat16().double() - x.bfloat16().double()).bfloat16(),
                sign_of_zero=False,
            ),
        )
    )
    for name in FP8:
        rows.append(
            Check(
                f"{name} x == x",
                "NaN codes differ from themselves",
                lambda name=name: _differs(
                    _binary("equal", _codes(name), _codes(name), torch.int32), (~_codes(name).float().isnan()).int()
                ),
            )
        )
        rows.append(
            Check(f"{name} x * y", "codes up to 4 in magnitude, one rounding", lambda name=name: _fp8_products(name))
        )
    i = torch.tensor([-7, 7, -7, 7, -1, -64, 63, 0, 2**31 - 1, -(2**31), 5, -5, 1, -1, 100, -100], dtype=torch.int32)
    j = torch.tensor([4, 4, -4, -4, 64, 64, 64, 64, 7, 7, 1, 1, 3, 3, 9, 9], dtype=torch.int32)
    rows.append(
        Check(
            "int32 //",
            "truncates toward zero",
            lambda: _differs(_binary("floordiv", i, j), torch.div(i, j, rounding_mode="trunc")),
        )
    )
    rows.append(Check("int32 %", "sign of the dividend", lambda: _differs(_binary("mod", i, j), torch.fmod(i, j))))
    rows.append(Check("int32 >>", "keeps the sign", lambda: _differs(_binary("shr", i, j % 8 + 8), i >> (j % 8 + 8))))
    rows.append(Check("int32 +", "wraps", lambda: _differs(_binary("add", i, i), (i.long() * 2).to(torch.int32))))
    rows.append(
        Check(
            "umulhi",
            "the high half of 32 x 32 bits",
            lambda: _differs(
                _binary("umulhi", i, j), (((i.long() & 0xFFFFFFFF) * (j.long() & 0xFFFFFFFF)) >> 32).to(torch.int32)
            ),
        )
    )
    return rows


@triton.jit
def unary_kernel(a, out, N: tl.constexpr, OP: tl.constexpr):
    lanes = tl.arange(0, N)
    x = tl.load(a + lanes)
    if OP == "exp2":
        r = tl.exp2(x)
    elif OP == "exp":
        r = tl.exp(x)
    elif OP == "log2":
        r = tl.log2(x)
    elif OP == "ceil_log2":
        r = tl.ceil(tl.log2(x))
    elif OP == "log":
        r = tl.log(x)
    elif OP == "sqrt":
        r = tl.sqrt(x)
    elif OP == "rsqrt":
        r = tl.rsqrt(x)
    elif OP == "sigmoid":
        r = tl.sigmoid(x)
    elif OP == "erf":
        r = tl.erf(x)
    elif OP == "abs":
        r = tl.abs(x)
    elif OP == "neg":
        r = -x
    elif OP == "floor":
        r = tl.floor(x)
    elif OP == "rint":
        r = libdevice.rint(x)
    elif OP == "tanh":
        r = libdevice.tanh(x)
    elif OP == "e8m0":
        r = (x.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    elif OP == "not":
        keep = x > 0.0
        r = tl.where(not keep, x, 0.0)
    elif OP == "and":
        r = tl.where((x > -1.0) and (x < 1.0), x, 0.0)
    elif OP == "or":
        r = tl.where((x < -1.0) or (x > 1.0), x, 0.0)
    elif OP == "max":
        r = max(x, 0.5)
    elif OP == "full":
        r = tl.full((N,), 0.1, tl.bfloat16)
    tl.store(out + lanes, r)


def _unary(op: str, x: torch.Tensor, out: torch.dtype | None = None) -> torch.Tensor:
    result = torch.zeros(x.shape, dtype=out or x.dtype)
    unary_kernel[(1,)](x, result, x.numel(), op)
    return result


def _within_ulps(op: str, want: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, ulps: float) -> str:
    exact = want(x.double())
    spacing = torch.from_numpy(np.spacing(np.abs(exact.float().numpy()))).double()
    return _far(_unary(op, x), exact, spacing * ulps)


def _functions() -> list[Check]:
    x = _numbers(4096, 5.0, 3)
    positive = x.abs() + 1e-3
    whole = torch.arange(-128, 128).float()[1:].repeat(2)[:256].clamp(max=127)
    deep = torch.arange(-149, -21).float()
    powers = torch.from_numpy(np.ldexp(np.float32(1), np.arange(-126, 2))).float()
    edges = torch.cat(
        [powers, torch.nextafter(powers, torch.tensor(INF)), torch.nextafter(powers, torch.tensor(0.0)), powers]
    )
    rows = [
        Check(
            f"fp32 {op}",
            f"4,096 values within {ulps} ulp of float64",
            lambda op=op, want=want, v=v, ulps=ulps: _within_ulps(op, want, v, ulps),
        )
        for op, want, v, ulps in (
            ("exp2", torch.exp2, x, 1),
            ("exp", torch.exp, x, 1),
            ("log2", torch.log2, positive, 1),
            ("log", torch.log, positive, 1),
            ("rsqrt", torch.rsqrt, positive, 1),
            ("sqrt", torch.sqrt, positive, 0.5),
            ("sigmoid", torch.sigmoid, x, 3),
            ("erf", torch.erf, x, 1),
            ("tanh", torch.tanh, x, 1),
        )
    ]
    rows += [
        Check(
            "fp32 exp2 of integers",
            "exact for -127 to 127",
            lambda: _differs(_unary("exp2", whole), torch.from_numpy(np.ldexp(1.0, whole.int().numpy())).float()),
        ),
        Check(
            "fp32 exp2 into subnormals",
            "exact for -149 to -22",
            lambda: _differs(_unary("exp2", deep), torch.from_numpy(np.ldexp(1.0, deep.int().numpy())).float()),
        ),
        Check(
            "fp32 log2 of powers of two",
            "exact for 2**-126 to 2**1",
            lambda: _differs(_unary("log2", powers), torch.arange(-126, 2).float()),
        ),
        Check(
            "fp32 ceil(log2(x))",
            "at powers of two and beside them: the ceiling of log2 rounded to fp32",
            lambda: _differs(_unary("ceil_log2", edges), torch.log2(edges.double()).float().ceil(), False),
        ),
        Check("fp32 floor", "4,096 values", lambda: _differs(_unary("floor", x), x.floor(), False)),
        Check(
            "libdevice.rint",
            "halves go to even",
            lambda: _differs(_unary("rint", torch.arange(-8, 8) / 2), (torch.arange(-8, 8) / 2).round(), False),
        ),
        Check(
            "E8M0 by bit shift",
            "all 256 scale bytes",
            lambda: _differs(
                _unary("e8m0", torch.arange(256, dtype=torch.uint8), torch.float32),
                torch.tensor([0.0] + [2.0 ** (b - 127) for b in range(1, 255)] + [INF]),
            ),
        ),
        Check("not on a block", "lane by lane", lambda: _differs(_unary("not", x), torch.where(x > 0, 0.0, x), False)),
        Check(
            "and on blocks",
            "lane by lane",
            lambda: _differs(_unary("and", x), torch.where((x > -1) & (x < 1), x, 0.0), False),
        ),
        Check(
            "or on blocks",
            "lane by lane",
            lambda: _differs(_unary("or", x), torch.where((x < -1) | (x > 1), x, 0.0), False),
        ),
        Check("max() on a block", "lane by lane", lambda: _differs(_unary("max", x), x.clamp(min=0.5), False)),
        Check(
            "tl.full of bf16",
            "0.1 rounds to nearest",
            lambda: _differs(_unary("full", x, torch.bfloat16), torch.full(x.shape, 0.1).bfloat16()),
        ),
    ]
    for name in ("bf16", "fp16", "e4m3fn", "e4m3fnuz", "e5m2"):
        codes = _codes(name)
        rows.append(
            Check(f"{name} abs", "every code", lambda codes=codes: _differs(_unary("abs", codes), codes.float().abs()))
        )
        if name in ("bf16", "fp16"):
            rows.append(
                Check(
                    f"{name} neg",
                    "every code",
                    lambda codes=codes: _differs(_unary("neg", codes), -codes.float(), False),
                )
            )
    return rows


# ---- matrix products


@triton.jit
def dot_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(x, y, input_precision="ieee"))


@triton.jit
def probability_dot_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    total = tl.zeros((M, N), tl.float32)
    for _ in range(2):
        total = tl.dot((x * 0.5).to(y.dtype), y, total)
    tl.store(out + m[:, None] * N + n[None, :], total)


@triton.jit
def int_dot_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(x, y, out_dtype=tl.int32))


@triton.jit
def scaled_dot_kernel(
    a,
    a_scale,
    b,
    b_scale,
    out,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    A_PACK: tl.constexpr,
    B_PACK: tl.constexpr,
):
    m, n, groups = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 32)
    ka, kb = tl.arange(0, K // A_PACK), tl.arange(0, K // B_PACK)
    x = tl.load(a + m[:, None] * (K // A_PACK) + ka[None, :])
    y = tl.load(b + n[None, :] * (K // B_PACK) + kb[:, None])
    xs = tl.load(a_scale + m[:, None] * (K // 32) + groups[None, :])
    ys = tl.load(b_scale + n[:, None] * (K // 32) + groups[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot_scaled(x, xs, A_FORMAT, y, ys, B_FORMAT))


def _dot(name: str, k: int, scale: float = 1.0, special: float | None = None) -> str:
    dtype = TYPES[name][0]
    a = _numbers(16 * k, scale, 4).view(16, k).to(dtype)
    b = _numbers(k * 32, scale, 5).view(k, 32).to(dtype)
    if special is not None:
        a.view(16, k)[0, 0] = special
    out = torch.zeros(16, 32)
    dot_kernel[(1,)](a, b, out, 16, 32, k)
    magnitude = a.double().abs() @ b.double().abs()
    return _far(out, a.double() @ b.double(), magnitude * (k * 2.0**-24))


_MX = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def _mx_values(codes: torch.Tensor, format_: str) -> torch.Tensor:
    if format_ != "e2m1":
        return codes.view(_MX[format_]).double()
    table = torch.tensor(_E2M1 + [-v for v in _E2M1], dtype=torch.float64)
    return torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1).flatten(-2)


def _dot_scaled(a_format: str, b_format: str, nan_codes: bool = False, extreme_scales: bool = False) -> str:
    m, n, k = 16, 32, 128
    generator = torch.Generator().manual_seed(6)

    def codes(format_: str, rows: int) -> torch.Tensor:
        drawn = torch.randint(0, 256, (rows, k // (2 if format_ == "e2m1" else 1)), generator=generator)
        if format_ == "e4m3" and not nan_codes:
            drawn[(drawn & 0x7F) == 0x7F] = 0x3C
        if format_ == "e5m2":
            drawn[(drawn & 0x7C) == 0x7C] = 0x3C
        return drawn.to(torch.uint8)

    a, b = codes(a_format, m), codes(b_format, n)
    a_scale, b_scale = (torch.randint(118, 136, (r, k // 32), generator=generator).to(torch.uint8) for r in (m, n))
    if extreme_scales:
        a_scale[0, 0], a_scale[1, 0] = 0, 255
    out = torch.zeros(m, n)
    typed = [c if f == "e2m1" else c.view(_MX[f]) for c, f in ((a, a_format), (b, b_format))]
    packs = [2 if f == "e2m1" else 1 for f in (a_format, b_format)]
    scaled_dot_kernel[(1,)](typed[0], a_scale, typed[1], b_scale, out, m, n, k, a_format, b_format, *packs)

    def factor(scale: torch.Tensor) -> torch.Tensor:
        exact = torch.from_numpy(np.ldexp(1.0, scale.int().numpy() - 127))
        return torch.where(scale == 255, torch.tensor(NAN, dtype=torch.float64), exact).repeat_interleave(32, 1)

    x, y = _mx_values(a, a_format) * factor(a_scale), _mx_values(b, b_format) * factor(b_scale)
    return _far(out, x @ y.T, (x.abs() @ y.abs().T).nan_to_num() * (k * 2.0**-24))


def _probability_dot() -> str:
    a, b = _numbers(16 * 32, 1.0, 8).view(16, 32), _numbers(32 * 64, 1.0, 9).view(32, 64).bfloat16()
    out = torch.zeros(16, 64)
    probability_dot_kernel[(1,)](a, b, out, 16, 64, 32)
    p = (a * 0.5).bfloat16().double()
    return _far(out, 2 * (p @ b.double()), (p.abs() @ b.double().abs()) * 2.0**-18)


def _int_dot() -> str:
    a = (torch.arange(16 * 64) * 37 % 255 - 127).to(torch.int8).view(16, 64)
    b = (torch.arange(64 * 32) * 91 % 255 - 127).to(torch.int8).view(64, 32)
    out = torch.zeros(16, 32, dtype=torch.int32)
    int_dot_kernel[(1,)](a, b, out, 16, 32, 64)
    return _differs(out, (a.long() @ b.long()).int())


def _products() -> list[Check]:
    rows = [
        Check(
            f"dot {name}, k={k}", "against float64, within k fp32 roundings", lambda n=name, k=k, s=scale: _dot(n, k, s)
        )
        for name, k, scale in (
            ("fp32", 512, 1.0),
            ("bf16", 512, 1.0),
            ("fp16", 512, 1.0),
            ("fp16", 128, 60.0),
            ("e4m3fn", 128, 1.0),
            ("e4m3fnuz", 128, 1.0),
            ("e5m2", 128, 1.0),
            ("e5m2fnuz", 128, 1.0),
            ("e4m3fn", 512, 100.0),
            ("e5m2", 256, 2e-5),
        )
    ]
    rows += [
        Check("dot bf16 with NaN", "one row of NaN", lambda: _dot("bf16", 64, special=NAN)),
        Check("dot e4m3fn with NaN", "one row of NaN", lambda: _dot("e4m3fn", 64, special=NAN)),
        Check("dot of probabilities in bf16", "(x / 2).to(bf16) @ bf16 accumulated in fp32 twice", _probability_dot),
        Check("dot int8", "exact", _int_dot),
    ]
    rows += [
        Check(f"dot_scaled {a} x {b}", "against float64", lambda a=a, b=b: _dot_scaled(a, b))
        for a, b in (("e4m3", "e4m3"), ("e2m1", "e2m1"), ("e4m3", "e2m1"), ("e5m2", "e5m2"))
    ]
    rows.append(
        Check(
            "dot_scaled with NaN codes",
            "NaN where an operand has one",
            lambda: _dot_scaled("e4m3", "e4m3", nan_codes=True),
        )
    )
    rows.append(
        Check(
            "dot_scaled with scale bytes 0 and 255",
            "2**-127 and NaN",
            lambda: _dot_scaled("e4m3", "e4m3", extreme_scales=True),
        )
    )
    return rows


# ---- reductions and scans


@triton.jit
def combine_online(m1, s1, m2, s2):
    top = tl.maximum(m1, m2)
    return top, s1 * tl.exp2(m1 - top) + s2 * tl.exp2(m2 - top)


@triton.jit
def reduce_kernel(a, out, index, M: tl.constexpr, N: tl.constexpr, OP: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(a + m[:, None] * N + n[None, :])
    if OP == "max":
        r = tl.max(x, axis=1)
    elif OP == "min":
        r = tl.min(x, axis=1)
    elif OP == "sum":
        r = tl.sum(x, axis=1)
    elif OP == "xor":
        r = tl.xor_sum(x, axis=1)
    elif OP == "argmax":
        r = tl.max(x, axis=1)
        tl.store(index + m, tl.argmax(x, axis=1))
    elif OP == "argmin":
        r = tl.min(x, axis=1)
        tl.store(index + m, tl.argmin(x, axis=1))
    elif OP == "indices":
        r, i = tl.max(x, axis=1, return_indices=True)
        tl.store(index + m, i)
    elif OP == "online":
        top, r = tl.reduce((x, tl.full((M, N), 1.0, tl.float32)), 1, combine_online)
        tl.store(index + m, top.to(tl.int32))
    elif OP == "all":
        r = tl.zeros((M,), tl.float32) + tl.sum(x)
    tl.store(out + m, r)


@triton.jit
def scan_kernel(a, out, M: tl.constexpr, N: tl.constexpr, OP: tl.constexpr, REVERSE: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(a + m[:, None] * N + n[None, :])
    if OP == "cumsum":
        r = tl.cumsum(x, axis=1, reverse=REVERSE)
    elif OP == "cummax":
        r = tl.associative_scan(x, 1, combine_max, reverse=REVERSE)
    elif OP == "sort":
        r = tl.sort(x)
    elif OP == "flip":
        r = tl.flip(x, 1)
    tl.store(out + m[:, None] * N + n[None, :], r)


@triton.jit
def combine_max(a, b):
    return tl.maximum(a, b)


@triton.jit
def histogram_kernel(a, out, N: tl.constexpr, BINS: tl.constexpr):
    x = tl.load(a + tl.arange(0, N))
    tl.store(out + tl.arange(0, BINS), tl.histogram(x, BINS))


def _reduce(op: str, x: torch.Tensor, want: torch.Tensor, index: torch.Tensor | None = None) -> str:
    out, found = torch.zeros(x.shape[0], dtype=x.dtype), torch.full((x.shape[0],), -9, dtype=torch.int32)
    reduce_kernel[(1,)](x, out, found, *x.shape, op)
    return _differs(out, want, False) or ("" if index is None else _differs(found, index))


def _scan(op: str, x: torch.Tensor, want: torch.Tensor, reverse: bool = False) -> str:
    out = torch.zeros(x.shape, dtype=x.dtype)
    scan_kernel[(1,)](x, out, *x.shape, op, reverse)
    return _differs(out, want, False)


def _online(x: torch.Tensor) -> str:
    out, top = torch.zeros(x.shape[0]), torch.zeros(x.shape[0], dtype=torch.int32)
    reduce_kernel[(1,)](x, out, top, *x.shape, "online")
    want = torch.exp2(x.double() - x.double().amax(1, keepdim=True)).sum(1)
    return _far(out, want, want * 1e-5) or _differs(top, x.amax(1).int())


def _reductions() -> list[Check]:
    rows = []
    for name in ("fp32", "bf16", "int32"):
        # Small integers: sums are exact in every type.
        x = (_numbers(8 * 64, 8.0, 10).view(8, 64).round().clamp(-3, 3)).to(TYPES[name][0])
        rows += [
            Check(f"max {name}", "8 rows of 64", lambda x=x: _reduce("max", x, x.amax(1))),
            Check(f"min {name}", "8 rows of 64", lambda x=x: _reduce("min", x, x.amin(1))),
            Check(
                f"sum {name}",
                "8 rows of 64 small integers",
                lambda x=x: _reduce("sum", x, x.double().sum(1).to(x.dtype)),
            ),
            Check(
                f"argmax {name}",
                "the leftmost of equals",
                lambda x=x: _reduce("argmax", x, x.amax(1), (x.double() == x.double().amax(1, True)).int().argmax(1)),
            ),
            Check(
                f"argmin {name}",
                "the leftmost of equals",
                lambda x=x: _reduce("argmin", x, x.amin(1), (x.double() == x.double().amin(1, True)).int().argmax(1)),
            ),
            Check(
                f"max with indices {name}",
                "the leftmost of equals",
                lambda x=x: _reduce("indices", x, x.amax(1), (x.double() == x.double().amax(1, True)).int().argmax(1)),
            ),
            Check(
                f"cumsum {name}",
                "along the last axis",
                lambda x=x: _scan("cumsum", x, x.double().cumsum(1).to(x.dtype)),
            ),
            Check(
                f"cumsum reversed {name}",
                "along the last axis",
                lambda x=x: _scan("cumsum", x, x.double().flip(1).cumsum(1).flip(1).to(x.dtype), True),
            ),
            Check(
                f"scan with an own combine {name}",
                "running maximum",
                lambda x=x: _scan("cummax", x, x.double().cummax(1)[0].to(x.dtype)),
            ),
            Check(f"sort {name}", "along the last axis", lambda x=x: _scan("sort", x, x.double().sort(1)[0])),
            Check(f"flip {name}", "along the last axis", lambda x=x: _scan("flip", x, x.flip(1))),
        ]
    holed = _numbers(4 * 32, 2.0, 11).view(4, 32)
    holed[0, 3] = holed[2, 0] = NAN
    holed[3] = NAN
    numbers_only = holed.double().nan_to_num(-INF).amax(1).where(~holed.isnan().all(1), torch.tensor(NAN).double())
    ints = torch.arange(8 * 64, dtype=torch.int32).view(8, 64) * 12345
    rows += [
        Check("max fp32 with NaN", "numbers win; all NaN gives NaN", lambda: _reduce("max", holed, numbers_only)),
        Check(
            "sum fp32 over all axes", "one number", lambda: _reduce("all", torch.ones(8, 16), torch.full((8,), 128.0))
        ),
        Check(
            "xor_sum int32",
            "8 rows of 64",
            lambda: _reduce("xor", ints, torch.from_numpy(np.bitwise_xor.reduce(ints.numpy(), axis=1))),
        ),
        Check(
            "reduce with an own combine",
            "running maximum and sum of an online softmax",
            lambda: _online(_numbers(8 * 32, 4.0, 12).view(8, 32)),
        ),
        Check("histogram", "values beyond the last bin are dropped", _histogram),
    ]
    return rows


def _histogram() -> str:
    x = torch.tensor([0, 1, 1, 3, 3, 3, 7, 8], dtype=torch.int32)
    out = torch.zeros(8, dtype=torch.int32)
    histogram_kernel[(1,)](x, out, 8, 8)
    return _differs(out, torch.tensor([1, 2, 0, 3, 0, 0, 0, 1]))


# ---- memory


@triton.jit
def masked_load_kernel(a, out, N: tl.constexpr, limit, OTHER: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(out + lanes, tl.load(a + lanes, mask=lanes < limit, other=OTHER))


@triton.jit
def bool_kernel(a, out, N: tl.constexpr):
    lanes = tl.arange(0, N)
    x = tl.load(a + lanes, mask=lanes < N - 2, other=True, cache_modifier=".cg")
    tl.store(out + lanes, x ^ True, mask=lanes < N - 1, eviction_policy="evict_first")


@triton.jit
def implicit_store_kernel(a, out, N: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(out + lanes, tl.load(a + lanes) * 1.0)


@triton.jit
def atomic_kernel(out, a, N: tl.constexpr, OP: tl.constexpr):
    lanes = tl.arange(0, N)
    x = tl.load(a + lanes)
    if OP == "add":
        tl.atomic_add(out + lanes % 2, x)
    elif OP == "max":
        tl.atomic_max(out + lanes % 2, x)
    elif OP == "min":
        tl.atomic_min(out + lanes % 2, x)


@triton.jit
def descriptor_kernel(a, out, M, N: tl.constexpr, BM: tl.constexpr, PADDING: tl.constexpr):
    source = tl.make_tensor_descriptor(a, [M, N], [N, 1], [BM, N], padding_option=PADDING)
    x = source.load([tl.program_id(0) * BM, 0])
    rows, lanes = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, N)
    tl.store(out + rows[:, None] * N + lanes[None, :], x)


@triton.jit
def block_pointer_kernel(a, out, M, N: tl.constexpr, BM: tl.constexpr):
    source = tl.make_block_ptr(a, (M, N), (N, 1), (0, 0), (BM, N), (1, 0))
    target = tl.make_block_ptr(out, (M, N), (N, 1), (0, 0), (BM, N), (1, 0))
    for _ in range(tl.cdiv(M, BM)):
        x = tl.load(source, boundary_check=(0,), padding_option="zero")
        tl.store(target, x * 2, boundary_check=(0,))
        source = tl.advance(source, (BM, 0))
        target = tl.advance(target, (BM, 0))


@triton.jit
def shape_kernel(a, indices, out, N: tl.constexpr, OP: tl.constexpr):
    lanes = tl.arange(0, N)
    x = tl.load(a + lanes)
    if OP == "gather":
        r = tl.gather(x, tl.load(indices + lanes), 0)
    elif OP == "split":
        even, odd = tl.split(tl.reshape(x, (N // 2, 2)))
        r = tl.reshape(tl.join(odd, even), (N,))
    elif OP == "interleave":
        even, odd = tl.split(tl.reshape(x, (N // 2, 2)))
        r = tl.interleave(even, odd)
    elif OP == "transpose":
        r = tl.reshape(tl.trans(tl.reshape(x, (4, N // 4))), (N,))
    elif OP == "cat":
        half = tl.reshape(x, (4, N // 4))
        both = tl.cat(half, -half, dim=1)
        wide = tl.arange(0, 2 * (N // 4))
        tl.store(out + tl.arange(0, 4)[:, None] * (2 * (N // 4)) + wide[None, :], both)
    if OP != "cat":
        tl.store(out + lanes, r)


def _masked_load(name: str, other: float) -> str:
    dtype = TYPES[name][0]
    out = torch.zeros(16).to(dtype)
    masked_load_kernel[(1,)](torch.ones(16).to(dtype), out, 16, 8, other)
    want = torch.cat([torch.ones(8), torch.full((8,), other)])
    return _differs(out, want)


def _atomic(op: str, name: str, want: list[float]) -> str:
    dtype = TYPES[name][0]
    out = torch.zeros(2).to(dtype)
    values = torch.tensor([1, -2, 3, -4, 5, -6, 7, -8]).to(dtype)
    atomic_kernel[(1,)](out, values, 8, op)
    return _differs(out, torch.tensor(want))


def _descriptor(name: str, padding: str) -> str:
    a = _numbers(6 * 32, 1.0, 13).view(6, 32).to(TYPES[name][0])
    out = torch.zeros(8, 32).to(TYPES[name][0])
    descriptor_kernel[(2,)](a, out, 6, 32, 4, padding)
    rest = torch.full((2, 32), NAN if padding == "nan" else 0.0)
    return _differs(out, torch.cat([a.float(), rest]))


def _block_pointer() -> str:
    a, out = _numbers(6 * 32, 1.0, 13).view(6, 32).bfloat16(), torch.zeros(7, 32).bfloat16()
    block_pointer_kernel[(1,)](a, out, 6, 32, 4)
    return _differs(out, torch.cat([a * 2, torch.zeros(1, 32)]), sign_of_zero=False)


def _shape(op: str, want: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str:
    x, order = _numbers(64, 1.0, 14), (torch.arange(64) * 37 % 64).int()
    out = torch.zeros(128 if op == "cat" else 64)
    shape_kernel[(1,)](x, order, out, 64, op)
    return _differs(out, want(x, order).flatten())


def _bool() -> str:
    x, out = torch.tensor([True, False] * 4), torch.ones(8, dtype=torch.bool)
    bool_kernel[(1,)](x, out, 8)
    return _differs(out.int(), torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]))


def _implicit_store() -> str:
    x, out = _numbers(1024, 1.0, 15), torch.zeros(1024, dtype=torch.bfloat16)
    implicit_store_kernel[(1,)](x, out, 1024)
    return _differs(out, x.bfloat16())


def _memory() -> list[Check]:
    rows = [
        Check(
            f"masked load of {name}, other={other}", "8 of 16 lanes masked", lambda n=name, o=other: _masked_load(n, o)
        )
        for name, other in (
            ("fp32", -INF),
            ("fp32", NAN),
            ("bf16", -1.5),
            ("fp16", 0.25),
            ("e4m3fn", 0.0),
            ("int32", -1),
            ("uint8", 127),
        )
    ]
    rows += [
        Check("storing fp32 to bf16 memory", "rounds to nearest even", _implicit_store),
        Check("masked load and store of bool", "with cache and eviction hints", _bool),
        Check("atomic_add fp32", "lanes share addresses", lambda: _atomic("add", "fp32", [16, -20])),
        Check("atomic_add int32", "lanes share addresses", lambda: _atomic("add", "int32", [16, -20])),
        Check("atomic_add bf16", "lanes share addresses", lambda: _atomic("add", "bf16", [16, -20])),
        Check("atomic_max fp32", "lanes share addresses", lambda: _atomic("max", "fp32", [7, 0])),
        Check("atomic_min fp32", "lanes share addresses", lambda: _atomic("min", "fp32", [0, -8])),
        Check("descriptor fp32, zero padding", "rows beyond the end", lambda: _descriptor("fp32", "zero")),
        Check("descriptor fp32, NaN padding", "rows beyond the end", lambda: _descriptor("fp32", "nan")),
        Check("descriptor bf16, NaN padding", "rows beyond the end", lambda: _descriptor("bf16", "nan")),
        Check("gather", "64 lanes permuted", lambda: _shape("gather", lambda x, i: x[i.long()])),
        Check("reshape, split, join", "swaps neighbours", lambda: _shape("split", lambda x, i: x.view(32, 2).flip(1))),
        Check("interleave", "undoes split", lambda: _shape("interleave", lambda x, i: x)),
        Check("trans", "4 x 16", lambda: _shape("transpose", lambda x, i: x.view(4, 16).T.contiguous())),
    ]
    if hasattr(triton.runtime.interpreter, "BlockPointerHandle"):
        rows.append(Check("block pointers bf16", "advance, boundary check on load and store", _block_pointer))
    if "dim" in inspect.signature(tl.cat).parameters:
        rows.append(
            Check(
                "cat along the last axis",
                "4 x 16 beside its negative",
                lambda: _shape("cat", lambda x, i: torch.cat([x.view(4, 16), -x.view(4, 16)], 1)),
            )
        )
    return rows


# ---- control flow and launching


@triton.jit
def while_kernel(out, limit):
    i = 0
    total = 0
    while i < limit:
        if i % 3 == 0:
            total += i
        i += 1
    tl.store(out, total)


@triton.jit
def stride_loop_kernel(out, limit):
    i = tl.program_id(0) * 4
    while i < limit:
        tl.store(out + i, i)
        i += 8


@triton.jit
def wrapping_loop_kernel(out, FACTOR: tl.constexpr):
    for i in range(4):
        tl.store(out + i, (i * FACTOR).to(tl.int64))


@triton.jit
def early_return_kernel(out, limit):
    i = tl.program_id(0)
    if i >= limit:
        return
    tl.store(out + i, i + 1)


@triton.jit
def scalar_logic_kernel(out, a, b):
    i = tl.program_id(0)
    inside = (i >= a) and (i < b)
    if not inside:
        tl.store(out + i, -1)
    elif i == a or i == b - 1:
        tl.store(out + i, 2)
    else:
        tl.store(out + i, 1)


@triton.jit
def float_argument_kernel(a, out, scale, N: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(out + lanes, tl.load(a + lanes) * scale)


@triton.jit
def two_results(x, S: tl.constexpr):
    return x * S, x + S


@triton.jit
def call_kernel(a, out, N: tl.constexpr):
    lanes = tl.arange(0, N)
    product, total = two_results(tl.load(a + lanes), 2.0)
    tl.store(out + lanes, product + total)


@triton.jit
def optional_kernel(a, out, N: tl.constexpr):
    lanes = tl.arange(0, N)
    if a is not None:
        tl.store(out + lanes, tl.load(a + lanes))
    else:
        tl.store(out + lanes, lanes.to(tl.float32))


@triton.autotune(configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"])
@triton.jit
def autotuned_kernel(a, out, n, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.load(a + lanes, mask=lanes < n), mask=lanes < n)


@triton.heuristics({"BLOCK": lambda arguments: 32})
@triton.jit
def heuristic_kernel(a, out, n, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.load(a + lanes, mask=lanes < n), mask=lanes < n)


def _while() -> str:
    out = torch.zeros(1, dtype=torch.int32)
    while_kernel[(1,)](out, 20)
    return _differs(out, torch.tensor([63]))


def _stride_loop() -> str:
    out = torch.zeros(32, dtype=torch.int32)
    stride_loop_kernel[(2,)](out, 32)
    return _differs(out[::4], torch.arange(0, 32, 4))


def _wrapping_loop() -> str:
    out = torch.zeros(4, dtype=torch.int64)
    wrapping_loop_kernel[(1,)](out, 2**30)
    return _differs(out, torch.tensor([0, 2**30, -(2**31), -(2**30)]))


def _early_return() -> str:
    out = torch.zeros(8, dtype=torch.int32)
    early_return_kernel[(8,)](out, 3)
    return _differs(out, torch.tensor([1, 2, 3, 0, 0, 0, 0, 0]))


def _scalar_logic() -> str:
    out = torch.zeros(8, dtype=torch.int32)
    scalar_logic_kernel[(8,)](out, 2, 6)
    return _differs(out, torch.tensor([-1, -1, 2, 1, 1, 2, -1, -1]))


def _float_argument() -> str:
    x, out = _numbers(256, 1.0, 16).bfloat16(), torch.zeros(256)
    float_argument_kernel[(1,)](x, out, 0.1, 256)
    return _differs(out, x.float() * torch.tensor(0.1))


def _call() -> str:
    x, out = _numbers(16, 1.0, 17), torch.zeros(16)
    call_kernel[(1,)](x, out, 16)
    return _differs(out, x * 2 + (x + 2))


def _optional() -> str:
    out = torch.zeros(16)
    optional_kernel[(1,)](None, out, 16)
    return _differs(out, torch.arange(16))


def _tuned(kernel: Any) -> str:
    x, out = _numbers(100, 1.0, 18), torch.zeros(100)
    kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, out, 100)
    return _differs(out, x)


def _control() -> list[Check]:
    return [
        Check("while with a run-time bound", "sums the multiples of 3 below 20", _while),
        Check("while on a tensor counter", "every fourth element", _stride_loop),
        Check("a loop variable is an int32", "i * 2**30 wraps", _wrapping_loop),
        Check("early return", "3 of 8 programs store", _early_return),
        Check("and, or, not on scalars", "8 programs", _scalar_logic),
        Check("a float argument is an fp32 tensor", "bf16 * float is fp32", _float_argument),
        Check("a device function with two results", "16 lanes", _call),
        Check("None as a pointer", "takes the other branch", _optional),
        Check("autotune", "runs without a GPU driver", lambda: _tuned(autotuned_kernel)),
        Check("heuristics", "fills the block size", lambda: _tuned(heuristic_kernel)),
    ]


CHECKS: tuple[Check, ...] = (
    *_casts(),
    *_arithmetic(),
    *_functions(),
    *_products(),
    *_reductions(),
    *_memory(),
    *_control(),
)
"""Every check, in the order of the table."""
