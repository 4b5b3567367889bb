"""Who knows the scratch memory that prefill takes from the pool, and what can each of them not be asked?"""

from __future__ import annotations

import importlib
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import NamedTuple, cast

import torch

from cases.case import Case
from cases.sparse_mla.prefill_workspace import Inputs, Outputs
from impl.implementation import Execution, Impl, bytes_of, exact_but, no_reasons

_EXACT = exact_but("integers")
_HERE = Path(__file__).parent
_BFLOAT16 = 2
_MARK = 256


class Ask(NamedTuple):
    """One call to the pool: the shapes of the gather buffer and of the attention rows, either of which may be absent."""

    gathered: tuple[int, ...] | None
    rows: tuple[int, ...] | None

    @property
    def marks(self) -> list[int]:
        """The pool's 256-byte marks at which the first view starts, the second starts, and the call ends."""
        sizes = [-(-prod(shape) * _BFLOAT16 // _MARK) if shape else 0 for shape in self]
        return list(accumulate(sizes, initial=0))


def asks(inputs: Inputs) -> list[Ask]:
    """The calls in order, one of each layer in the warm-up first."""
    fixed = inputs.window + inputs.max_batched
    widths = [fixed + (-(-inputs.max_len // ratio) if ratio else 0) for ratio in inputs.ratios.tolist()]
    calls = [(width, inputs.max_batched) for width in widths]
    calls += [
        (widths[layer], tokens) for layer, tokens in zip(inputs.layers.tolist(), inputs.tokens.tolist(), strict=True)
    ]
    has_rows = inputs.arch == "gfx950"
    return [
        Ask(
            (inputs.chunk_size, width, inputs.lanes) if inputs.gathers else None,
            (tokens, inputs.heads, inputs.lanes) if has_rows else None,
        )
        for width, tokens in calls
    ]


def answer_of(calls: list[Ask], starts: list[list[int]], needed: list[int], granted: list[bool]) -> Outputs:
    """The outputs from what was asked for and what was given."""
    columns = (
        [call.gathered or (0, 0, 0) for call in calls], [call.rows or (0, 0, 0) for call in calls],
        starts, needed, [int(given) for given in granted],
    )  # fmt: skip
    return Outputs(*(torch.tensor(column, dtype=torch.int64) for column in columns))


def run_ours(inputs: Inputs) -> Outputs:
    """The pool is as large as its largest warm-up call; what needs more is refused."""
    calls = asks(inputs)
    marks = [call.marks for call in calls]
    capacity = max(end for _, _, end in marks[: inputs.ratios.numel()])
    granted = [end <= capacity for _, _, end in marks]
    starts = [
        [_MARK * mark if given and view is not None else -1 for mark, view in zip(at, call, strict=False)]
        for call, at, given in zip(calls, marks, granted, strict=True)
    ]
    return answer_of(calls, starts, [_MARK * end for _, _, end in marks], granted)


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.sparse_mla.prefill_workspace_vllm").run(inputs))


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del case, execution
    layer = importlib.import_module("impl.sparse_mla.layer_vllm")
    return list(layer.missing(layer.V41))


def _vllm_source() -> bytes:
    layer = importlib.import_module("impl.sparse_mla.layer_vllm")
    return cast(bytes, layer.fingerprint(layer.V41, layer.WORKSPACE_MODULE))


def _key(case: Case) -> str:
    return case.op


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-host",
        run=run_ours,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "prefill_workspace.py"),
    ),
    Impl(
        name="vllm-host",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=_vllm_source,
    ),
)
