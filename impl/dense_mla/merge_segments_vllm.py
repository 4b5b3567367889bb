"""How is vLLM's own merge of the segments of a decode called?

As its verify route under decode context parallelism calls it; it allocates its answer.
"""

from __future__ import annotations

from cases.dense_mla.merge_segments import Inputs, Outputs
from impl.dense_mla.merge_modules import SEGMENTS, loader
from impl.dense_mla.merge_segments import MERGE


def run(inputs: Inputs) -> Outputs:
    """The function's answer; it raises what it raises."""
    merge = loader(inputs.sums.device).symbol(SEGMENTS, MERGE)
    out, lse = merge(inputs.sums, inputs.maxima, inputs.masses, inputs.lengths, inputs.tile, inputs.out.dtype)
    return Outputs(out, lse)
