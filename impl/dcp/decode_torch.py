"""How does plain torch decode over a sharded cache: both the attention of a rank and the merge?"""

from __future__ import annotations

from cases.dcp.decode import Inputs, Outputs
from impl.dcp import decode_call


def run(inputs: Inputs) -> Outputs:
    """The answers of all ranks; raises `ValueError` for what is no call."""
    return decode_call.run("impl.dense_mla.decode_torch", "impl.dcp.combine_torch", inputs)
