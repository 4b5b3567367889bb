"""How does vLLM map tokens to the slots of their compressed records?"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from cases.cache.compressed_slots import Inputs, Outputs
from impl.cache.compressed_slots import MAP, MODULE
from impl.sources import settings, vllm
from impl.sources.execution import execution_on


@functools.cache
def _loaded(path: Path | None, execution: str) -> Any:
    return vllm.load(vllm.locate(path), vllm.Platform("gfx950"), execution).symbol(MODULE, MAP)


def run(inputs: Inputs) -> Outputs:
    """What `get_compressed_slot_mapping` says; where there is a buffer, the buffer."""
    execution = execution_on(inputs.table.device)
    slots = _loaded(settings.vllm_path(), execution)(
        inputs.tokens, inputs.token_slots, inputs.query_start, inputs.seq_lens, inputs.table, inputs.block_size,
        inputs.ratio, out=inputs.out, dcp_world_size=inputs.ranks, cp_interleave=inputs.interleave,
    )  # fmt: skip
    return Outputs(slots if inputs.out is None else inputs.out)
