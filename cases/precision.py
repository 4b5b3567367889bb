"""Where may an implementation round, and how coarsely?

A `Precision` is data that an implementation declares for an execution. The oracle turns it into a budget; the record
carries it. A rounding point that nobody declared is a defect.
"""

from typing import Literal

import msgspec

# Unit roundoffs: the largest relative error of one rounding to nearest, half an ulp at the bottom of a binade.
UNIT_ROUNDOFF: dict[str, float] = {
    "exact": 0.0,
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
}

Rounding = Literal["exact", "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz"]


class Precision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The rounding points of one implementation on one execution.

    Assumed of all: the exponential of 0 is 1, so the largest key of a tile keeps its weight exactly.

    score: the format that partial sums of a query-key product are kept in.
    query: the format that the scaled query is rounded to before the product ("exact" when it is used as given).
    key: the format that a key is rounded to once it is decoded and scaled ("exact" when that changes nothing).
    probability: the format that exp(score - max) is rounded to before it multiplies the values.
    accumulate: the format that value sums are kept in.
    partial: the format that a split's un-normalised sum is stored in.
    averaged: whether a split's result is stored as an average, to be weighed by its log-sum-exp.
    output: the format that the answer is rounded to before it is stored, where the output tensor is wider.
    exponential_ulps: the largest error of the exponential, in units of 2^-24.
    systematic_ulps: error of a score, in units of 2^-24 of it, that all keys share, from folded factors and truncation.
    flushes: whether fp32 subnormals may become zero.
    note: what the numbers rest on.
    """

    score: Rounding = "float32"
    query: Rounding = "exact"
    key: Rounding = "exact"
    probability: Rounding = "bfloat16"
    accumulate: Rounding = "float32"
    partial: Rounding = "float32"
    averaged: bool = False
    output: Rounding = "float32"
    exponential_ulps: float = 4.0
    systematic_ulps: float = 8.0
    flushes: bool = True
    note: str = ""
