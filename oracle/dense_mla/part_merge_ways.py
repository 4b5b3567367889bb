"""How do kernels merge the parts of a softmax, rightly in several ways and wrongly in many more?

`compute` is a second formulation in fp32, shaped like the kernels: two passes, one running pass that rescales, or weights
against the rounded log-sum-exp. Every fault is one name, looked at in the one place where a kernel would err.
"""

import dataclasses
import math
from typing import Literal

import torch

from cases.memory import storage_bytes
from oracle.dense_mla.part_merge import LN2, Parts
from oracle.formats.numbers import round_to_bfloat16

Order = Literal["two_passes", "running", "anchored", "shared_first"]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of merging.

    order: `two_passes` the maximum, then weighted sums and one division; `running` one part after the other, rescaling;
    `anchored` weights against the rounded lse; `shared_first` weights divided by their sum before they are used.
    """

    order: Order = "two_passes"
    backwards: bool = False
    faults: frozenset[str] = frozenset()

    def has(self, *faults: str) -> bool:
        """Whether one of the faults is committed."""
        return any(fault in self.faults for fault in faults)


# Fault and the clause that completes "as if"; those that need an option of the way follow their clause.
FAULTS: dict[str, str] = {
    "exponents-taken-for-the-other-base": "the exponents counted in the other base",
    "lse-in-base-2": "the log-sum-exp were returned in base 2",
    "lse-is-the-maximum": "the log-sum-exp were the largest one of the parts",
    "lse-of-the-mean": "the log-sum-exp were that of the mean over the parts",
    "empty-parts-multiplied-by-0": "what an empty part holds were multiplied by 0 instead of left out",
    "both-neg-inf": "a row without a part divided 0 by 0",
    "empty-row-lse-finite": "a row without a part had the lowest finite log-sum-exp",
    "empty-split-nonzero": "an empty part weighed as if its log-sum-exp were 0",
    "nan-to-num-everywhere": "a NaN in a value were taken for 0",
    "combine-no-max-shift": "weights were taken without subtracting the maximum",
    "maximum-starts-at-0": "the maximum were at least 0",
    "rescale-forgotten": "the running sums were not rescaled when the maximum grew",
    "parts-weighted-equally": "all parts that are not empty weighed the same",
    "heaviest-part-alone": "only the heaviest part counted",
    "last-part-lost": "the last part that is not empty were lost",
    "first-part-lost": "the first part that is not empty were lost",
    "last-part-twice": "the last part that is not empty counted twice",
    "weights-not-normalised": "the weighted sum were not divided",
    "weights-divided-twice": "the weighted sum were divided twice",
    "denominator-counts-the-parts": "the weighted sum were divided by the number of parts",
    "weights-in-bfloat16": "weights were rounded to bf16",
    "running-sum-in-bfloat16": "the weighted sum were kept in bf16",
    "tail-lanes-lost": "lanes beyond the last multiple of 64, or the last one, were left out",
    "exponents-of-the-next-part": "each part had the exponent of the one behind it",
    "exponents-of-the-next-head": "each head had the exponents of the one behind it",
    "exponents-of-the-first-row": "all rows had the exponents of the first one",
    "heads-reversed": "the heads were in reverse order",
}
_RUNNING = ("rescale-forgotten", "running-sum-in-bfloat16")


def way_of(fault: str) -> Way:
    """The way that commits one fault."""
    return Way(order="running" if fault in _RUNNING else "two_passes", faults=frozenset({fault}))


def compute(parts: Parts, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """out [rows, heads, lanes] and lse [rows, heads] in fp32, merged this way."""
    values, exponents, masses = _read(parts, way)
    empty = torch.isneginf(exponents)
    live = ~empty.all(0) if values.shape[0] else torch.zeros(values.shape[1:3], dtype=torch.bool)
    out, lse = torch.zeros(values.shape[1:]), torch.full(values.shape[1:3], -math.inf)
    if values.shape[0]:
        out, total, top = _summed(parts, values, exponents, masses, empty, way)
        lse = _log(parts, top, total, values.shape[0], way)
        live = live & (total != 0) if parts.masses is not None else live
        if way.has("weights-not-normalised") or way.order == "anchored":
            pass
        elif way.has("denominator-counts-the-parts"):
            out = out / values.shape[0]
        elif way.order != "shared_first":
            out = out / total[..., None]
            if way.has("weights-divided-twice"):
                out = out / total[..., None]
        if way.has("tail-lanes-lost"):
            lanes = out.shape[-1]
            out[..., (lanes - 1) // 64 * 64 if lanes > 64 else lanes - 1 :] = 0.0
        if way.has("heads-reversed"):
            out, lse, live = out.flip(1), lse.flip(1), live.flip(1)
    if way.has("both-neg-inf"):
        return torch.where(live[..., None], out, math.nan), torch.where(live, lse, -math.inf)
    nothing = torch.finfo(torch.float32).min if way.has("empty-row-lse-finite") else -math.inf
    return torch.where(live[..., None], out, 0.0), torch.where(live, lse, nothing)


def _read(parts: Parts, way: Way) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, exponents and masses in fp32 as the way reads them."""
    values, exponents = parts.values.float(), parts.exponents.float()
    masses = torch.ones_like(exponents) if parts.masses is None else parts.masses.float()
    if way.has("nan-to-num-everywhere"):
        values = values.nan_to_num(nan=0.0)
    if way.has("exponents-of-the-next-part"):
        exponents = exponents.roll(-1, 0)
    if way.has("exponents-of-the-next-head"):
        exponents = exponents.roll(-1, 2)
    if way.has("exponents-of-the-first-row"):
        exponents = exponents[:, :1].expand(exponents.shape)
    number = torch.arange(values.shape[0])[:, None, None]
    solid = ~torch.isneginf(exponents)
    last = torch.where(solid, number, -1).amax(0, keepdim=True) if values.shape[0] else number
    first = torch.where(solid, number, values.shape[0]).amin(0, keepdim=True) if values.shape[0] else number
    several = solid.sum(0, keepdim=True) > 1
    if way.has("last-part-lost"):
        exponents = exponents.masked_fill((number == last) & several, -math.inf)
    if way.has("first-part-lost"):
        exponents = exponents.masked_fill((number == first) & several, -math.inf)
    if way.has("last-part-twice"):
        twice = 1.0 if parts.base_two else LN2
        exponents = torch.where(number == last, exponents + twice, exponents)
    if way.has("heaviest-part-alone") and values.shape[0]:
        exponents = exponents.masked_fill(exponents < exponents.amax(0), -math.inf)
    if way.backwards:
        values, exponents, masses = values.flip(0), exponents.flip(0), masses.flip(0)
    return values, exponents, masses


def _power(parts: Parts, exponents: torch.Tensor, way: Way) -> torch.Tensor:
    two = parts.base_two != way.has("exponents-taken-for-the-other-base")
    return torch.exp2(exponents) if two else torch.exp(exponents)


def _summed(
    parts: Parts, values: torch.Tensor, exponents: torch.Tensor, masses: torch.Tensor, empty: torch.Tensor, way: Way
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weighted values, the sum of masses and the maximum that they are relative to."""
    if way.order == "running":
        return _running(parts, values, exponents, masses, empty, way)
    top = exponents.amax(0)
    if way.has("maximum-starts-at-0"):
        top = top.clamp(min=0.0)
    if way.has("combine-no-max-shift"):
        top = torch.zeros_like(top)
    top = torch.where(torch.isneginf(top), 0.0, top)
    weight = _power(parts, exponents - top, way)
    if way.has("empty-split-nonzero"):
        weight = torch.where(empty, _power(parts, -top, way), weight)
        values, masses = values.masked_fill(empty[..., None], 0.0), torch.where(empty, 1.0, masses)
    if way.has("parts-weighted-equally"):
        weight = (~empty).float()
    if way.has("weights-in-bfloat16"):
        weight = round_to_bfloat16(weight).float()
    total = torch.where(weight == 0, 0.0, weight * masses).sum(0)
    if way.order == "shared_first":
        weight = weight / total
    if way.order == "anchored":
        weight = _power(parts, exponents - (top + (total.log2() if parts.base_two else total.log())), way)
    terms = weight[..., None] * values
    if not way.has("empty-parts-multiplied-by-0"):
        terms = torch.where(weight[..., None] == 0, 0.0, terms)
    return terms.sum(0), total, top


def _running(
    parts: Parts, values: torch.Tensor, exponents: torch.Tensor, masses: torch.Tensor, empty: torch.Tensor, way: Way
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    top = torch.full(exponents.shape[1:], -math.inf)
    total, out = torch.zeros_like(top), torch.zeros(values.shape[1:])
    for value, exponent, mass, void in zip(values, exponents, masses, empty, strict=True):
        higher = torch.maximum(top, exponent)
        floor = torch.where(torch.isneginf(higher), 0.0, higher)
        shrink = torch.ones_like(top) if way.has("rescale-forgotten") else _power(parts, top - floor, way)
        weight = _power(parts, exponent - floor, way)
        total = total * shrink + torch.where(void, 0.0, weight * mass)
        out = out * shrink[..., None] + torch.where(void[..., None], 0.0, weight[..., None] * value)
        if way.has("running-sum-in-bfloat16"):
            out = round_to_bfloat16(out).float()
        top = higher
    return out, total, torch.where(torch.isneginf(top), 0.0, top)


def _log(parts: Parts, top: torch.Tensor, total: torch.Tensor, count: int, way: Way) -> torch.Tensor:
    if way.has("lse-of-the-mean"):
        total = total / count
    if way.has("lse-is-the-maximum"):
        total = torch.ones_like(total)
    two = parts.base_two != way.has("exponents-taken-for-the-other-base")
    log = (top + total.log2()) * LN2 if two else top + total.log()
    return log / LN2 if way.has("lse-in-base-2") else log


def rounded(out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 numbers rounded to nearest even to a dtype."""
    return round_to_bfloat16(out) if dtype == torch.bfloat16 else out.to(dtype)


def cut(out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 numbers cut off to bf16 or fp16."""
    mask = -65536 if dtype == torch.bfloat16 else -8192
    return (out.contiguous().view(torch.int32) & mask).view(torch.float32).to(dtype)


def as_if_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """What lies in memory from the first element on, as if it were contiguous, in the shape of the tensor."""
    size = tensor.element_size()
    memory = storage_bytes(tensor)[tensor.storage_offset() * size :]
    return memory[: tensor.numel() * size].view(tensor.dtype).view(tensor.shape)
