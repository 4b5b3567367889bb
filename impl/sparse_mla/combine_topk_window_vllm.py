"""How does vLLM join selected and window entries into rows of workspace indices?"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from cases.sparse_mla.combine_topk_window import Inputs, Outputs
from impl.sources import settings, vllm
from impl.sources.execution import execution_on
from impl.sparse_mla.combine_topk_window import NAME


@functools.cache
def _function(path: Path | None, module: str, execution: str) -> Any:
    return vllm.load(vllm.locate(path), vllm.Platform("gfx950"), execution).symbol(module, NAME)


def run(inputs: Inputs, module: str, into: bool) -> Outputs:
    """The answer of `module`; `into` hands it the output memory of the call, which not every form takes."""
    execution = execution_on(inputs.topk.device)
    combine = _function(settings.vllm_path(), module, execution)
    memory = {"out": (inputs.combined, inputs.lens)} if into else {}
    combined, lens = combine(
        inputs.topk, inputs.query_start, inputs.seq_lens, inputs.gather_lens, inputs.window, inputs.ratio,
        inputs.top_k, inputs.request_rows, inputs.compressed_rows, **memory,
    )  # fmt: skip
    return Outputs(combined, lens)
