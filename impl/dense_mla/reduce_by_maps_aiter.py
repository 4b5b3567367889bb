"""How is AITER's compiled reduction asked?

As its own MLA decode asks it: the longest group only sizes its launch, and 0 splits leave the most parts of a group to the
device's compute units.
"""

from __future__ import annotations

import importlib

from cases.dense_mla.reduce_by_maps import Inputs, Outputs


def run(inputs: Inputs) -> Outputs:
    """The kernel's answer; it raises what it raises."""
    rows = 1
    if inputs.groups is None:
        if inputs.group_start[-1]:
            rows = int(inputs.parts[1] - inputs.parts[0])
    elif len(inputs.groups):
        merged = inputs.group_start.diff() > 1
        rows = int((inputs.groups[:, 1] - inputs.groups[:, 0])[merged].max()) if bool(merged.any()) else 1
    importlib.import_module("aiter").mla_reduce_v1(
        inputs.partial_out, inputs.partial_lse, inputs.group_start, inputs.groups, inputs.parts, rows, 0, inputs.out,
        inputs.lse,
    )  # fmt: skip
    return Outputs(inputs.out, inputs.lse)
