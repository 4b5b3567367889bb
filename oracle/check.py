"""Is an output within its budget, and if not, what is the sentence that says so?

Three measures. `exact`: bit for bit. `bounded`: per element, |got - want| < budget, no share of elements forgiven, NaN
and infinity in the same places. `codes`: quantised values between the codes of the two ends of a bound.
"""

import math
from typing import Literal

import msgspec
import numpy as np
import torch

from oracle.formats.numbers import round_to_bfloat16

Measure = Literal["exact", "bounded", "codes", "rms", "bias", "ranking", "plan"]
Status = Literal["pass", "fail", "memory", "unsupported", "error", "crash", "hang", "vacuous"]

# Budget use of an error where none is allowed: JSON has no infinity.
OFF_THE_SCALE = 1e9
# Budget use of an element that lies on the end of its budget, as a tie does.
_JUST_INSIDE = 1.0 - 2.0**-20


class Check(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One judged output: how far its worst element is from what it should be, in units of its budget.

    use: error / budget of the worst element; 1.0 and more fails.
    use_rms: root mean square of error / budget over all elements (0 where the measure has no budget per element).
    wrong: elements that fail, out of `count`.
    where, got, want, error, budget: the worst element.
    why: the sentence's reason.
    """

    output: str
    measure: Measure
    use: float
    use_rms: float = 0.0
    wrong: int = 0
    count: int = 0
    where: tuple[int, ...] = ()
    got: str = ""
    want: str = ""
    error: float = 0.0
    budget: float = 0.0
    why: str = ""

    @property
    def passed(self) -> bool:
        """Whether the check holds: budget use below 1."""
        return self.use < 1.0

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.where))}]" if self.where else ""
        if self.count == 0:
            return f"{self.output}: no elements, and the form is right ({self.measure})"
        if self.passed and self.measure in ("exact", "codes"):
            return f"{self.output}: all {self.count} elements are right ({self.measure})"
        if self.passed:
            return (
                f"{self.output}{place}={self.got}, should be {self.want}: {self.measure}, uses {self.use:.3g} of its budget "
                f"at worst, {self.use_rms:.3g} rms over {self.count} elements"
            )
        return f"{self.output}{place}={self.got}, but should be {self.want}: {self.why}"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one case on one implementation: the status, the checks, and the reasons in sentences."""

    status: Status
    checks: tuple[Check, ...] = ()
    reasons: tuple[str, ...] = ()
    diagnosis: tuple[str, ...] = ()


def verdict_of(checks: tuple[Check, ...]) -> Status:
    """`pass` when every check holds, `vacuous` when there is no check that could have failed.

    A call without elements still has a form that can be wrong, so its checks count.
    """
    if not all(check.passed for check in checks):
        return "fail"
    return "pass" if checks else "vacuous"


def _place(flat: int, shape: torch.Size) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        place.append(flat % size)
        flat //= size
    return tuple(reversed(place))


def spelled(value: torch.Tensor) -> str:
    """One element as people read it: nine significant digits for floats, hexadecimal beside small unsigned codes."""
    if value.dtype.is_floating_point:
        return f"{float(value.double()):.9g}"
    if value.dtype == torch.uint8:
        return f"{int(value)} (0x{int(value):02X})"
    return str(int(value))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.dtype == torch.bool:
        return tensor.to(torch.uint8)
    return tensor.contiguous().view(sizes[tensor.element_size()])


def wrong_form(output: str, got: torch.Tensor | None, want: torch.Tensor) -> Check | None:
    """The failing check when `got` is absent or has another shape or dtype than `want`; None when the form is right."""
    if got is None:
        form = "nothing"
    elif tuple(got.shape) != tuple(want.shape) or got.dtype != want.dtype:
        form = f"{str(got.dtype).removeprefix('torch.')}{list(got.shape)}"
    else:
        return None
    return Check(
        output=output, measure="exact", use=OFF_THE_SCALE, wrong=1, count=1, got=form,
        want=f"{str(want.dtype).removeprefix('torch.')}{list(want.shape)}", why="another shape or dtype than the op's",
    )  # fmt: skip


def exact(
    output: str, got: torch.Tensor | None, want: torch.Tensor, *, mask: torch.Tensor | None = None,
    why: str = "this output is exact, bit for bit",
) -> Check:  # fmt: skip
    """Bit for bit, where `mask` (bool, broadcastable to the shape of `want`) is True, or everywhere."""
    form = wrong_form(output, got, want)
    if form is not None:
        return form
    assert got is not None
    got, want = got.detach().cpu(), want.detach().cpu()
    differs = _bits(got) != _bits(want)
    count = want.numel()
    if mask is not None:
        mask = mask.expand(want.shape)
        differs &= mask
        count = int(mask.sum())
    wrong = int(differs.sum())
    if not wrong:
        return Check(output=output, measure="exact", use=0.0, count=count)
    place = _place(int(differs.flatten().int().argmax()), want.shape)
    return Check(
        output=output, measure="exact", use=OFF_THE_SCALE, wrong=wrong, count=count, where=place,
        got=spelled(got[place]), want=spelled(want[place]),
        why=f"{why}; {wrong} of {count} elements differ",
    )  # fmt: skip


def half_ulp(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest error of rounding a number of at most `magnitude` to `dtype`, in the dtype of `magnitude`.

    Half of the spacing in the binade of `magnitude`; below the smallest normal number, half of the smallest subnormal.
    """
    info = torch.finfo(dtype)
    digits = round(-math.log2(info.eps))
    lowest = round(math.log2(info.smallest_normal))
    _, exponent = torch.frexp(magnitude)
    exponent = torch.where(magnitude > 0, exponent - 1, lowest).clamp(min=lowest)
    return torch.ldexp(torch.ones_like(magnitude), exponent - digits - 1)


def bounded(
    output: str, got: torch.Tensor | None, want: torch.Tensor, budget: torch.Tensor, *, dtype: torch.dtype,
    rounding: torch.dtype | None = None, why: str = "outside the budget of the declared rounding points",
) -> Check:  # fmt: skip
    """Per element: NaN and infinity where `want` has them, and elsewhere |got - want| below `budget`.

    `want` is the reference in fp32 or fp64, `dtype` the dtype that `got` must have. With `rounding`, the budget is that of
    the value before its last rounding to that dtype: `got` must be the rounding of some value within the budget, so a
    budget of 0 asks for `want` rounded, by value (the sign of zero is free), and budget use counts what the last rounding
    cannot explain. The check's own budget has half an ulp added.
    """
    form = wrong_form(output, got, torch.empty(want.shape, dtype=dtype, device="meta"))
    if form is not None:
        return form
    assert got is not None
    if want.numel() == 0:
        return Check(output=output, measure="bounded", use=0.0)
    value = got.detach().to(want.device).to(want.dtype)
    finite = torch.isfinite(want)
    same_special = (torch.isnan(want) & torch.isnan(value)) | (want == value)
    error = (value - want).abs()
    if rounding is None:
        total = budget
        settled = error < budget
    else:
        low, high = (_rounded(want + side * budget, rounding) for side in (-1, 1))
        settled = (value >= low) & (value <= high)
        total = torch.where(budget == 0, (high - want).abs(), budget + half_ulp(want.abs() + budget, rounding))
    right = torch.where(finite, settled | ((error == 0) & (total == 0)), same_special)
    # Budget use leaves the last rounding out: what of the error it cannot explain, over what may precede it. An answer that
    # no value in the budget rounds to is out, whatever the ratio says.
    before = error
    if rounding is not None:
        rounded = value == _rounded(want, rounding)
        before = torch.where(rounded, 0.0, (error - half_ulp(value.abs(), rounding)).clamp(min=0))
    use = torch.where(finite & (before > 0), before / budget, 0.0)
    use = torch.nan_to_num(use, nan=OFF_THE_SCALE, posinf=OFF_THE_SCALE).clamp(max=OFF_THE_SCALE)
    use = torch.where(right, use.clamp(max=_JUST_INSIDE), torch.where(finite, use.clamp(min=1.0), OFF_THE_SCALE))
    # Among equals the largest error over everything allowed is shown.
    # Where a finite number rightly rounds to infinity both are infinite, and a NaN would hide every other element.
    shown = torch.where(finite & (total > 0), (error / total).clamp(max=1.0), 0.0).nan_to_num(0.0) * 2.0**-30
    place = _place(int((use + shown).flatten().argmax()), want.shape)
    wrong = int((~right).sum())
    allowed, ratio = float(total[place]), float(use[place])
    known = rounding is not None and float(budget[place]) == 0
    margin = "bit for bit" if known or not allowed else f"±{allowed:.3g}"
    return Check(
        output=output, measure="bounded", use=ratio, use_rms=float(use.double().square().mean().sqrt()), wrong=wrong,
        count=want.numel(), where=place, got=spelled(value[place]), want=f"{spelled(want[place])} {margin}",
        error=_number(float(error[place])), budget=0.0 if known else _number(allowed),
        why=f"{why}, {_times(ratio)}; {wrong} of {want.numel()} elements are out",
    )  # fmt: skip


def _rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # torch narrows float64 to narrower formats by way of float32, which rounds twice.
    if dtype == torch.bfloat16:
        return round_to_bfloat16(value).to(value.dtype)
    if dtype == torch.float16 and value.dtype == torch.float64:
        with np.errstate(over="ignore"):
            narrow = value.cpu().numpy().astype(np.float16)
        return torch.from_numpy(narrow).to(value.device, value.dtype)
    return value.to(dtype).to(value.dtype)


def _number(value: float) -> float:
    return value if math.isfinite(value) else OFF_THE_SCALE


def _times(ratio: float) -> str:
    return "where none is allowed" if ratio >= OFF_THE_SCALE else f"{ratio:.3g} times"


def codes(
    output: str, got: torch.Tensor | None, low: torch.Tensor, high: torch.Tensor, *, dtype: torch.dtype,
    why: str = "no value within the budget rounds to this code",
) -> Check:  # fmt: skip
    """Quantised values: decoded, each lies between the roundings of the two ends of its bound.

    Rounding is monotone, so this is exact: one step of difference passes only where a tie lies inside the bound. `low`
    and `high` are the decoded codes of the ends, in fp32.
    """
    form = wrong_form(output, got, torch.empty(low.shape, dtype=dtype, device="meta"))
    if form is not None:
        return form
    assert got is not None
    if low.numel() == 0:
        return Check(output=output, measure="codes", use=0.0)
    value = got.detach().to(low.device).float()
    out = ~((value >= low) & (value <= high))
    wrong = int(out.sum())
    free = int((low != high).sum())
    if not wrong:
        return Check(output=output, measure="codes", use=0.0, use_rms=free / low.numel(), count=low.numel())
    place = _place(int(out.flatten().int().argmax()), low.shape)
    want = spelled(low[place]) if low[place] == high[place] else f"{spelled(low[place])} to {spelled(high[place])}"
    return Check(
        output=output, measure="codes", use=OFF_THE_SCALE, wrong=wrong, count=low.numel(), where=place,
        got=spelled(value[place]), want=want, why=f"{why}; {wrong} of {low.numel()} codes are out",
    )  # fmt: skip


def statistic(output: str, measure: Literal["rms", "bias"], value: float, limit: float, count: int, why: str) -> Check:
    """A statistic over all elements against the limit that its declared false-alarm rate sets."""
    use = OFF_THE_SCALE if not math.isfinite(value) else min(OFF_THE_SCALE, abs(value) / limit)
    return Check(
        output=f"{measure} of {output}", measure=measure, use=use, use_rms=use, wrong=int(use >= 1), count=count,
        got=f"{value:.4g}", want=f"within ±{limit:.4g}", error=_number(abs(value)), budget=limit, why=why,
    )  # fmt: skip
