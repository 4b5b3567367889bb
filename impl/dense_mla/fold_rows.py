"""Who folds query rows for kernels of 16 heads, and what can each of them not be asked?

AITER folds inside its decode entry point and has no function for it, so that it answers here through decode alone.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.dense_mla.fold_rows import HEADS, FoldCase, Inputs, Outputs
from impl.implementation import Impl, bytes_of, exact_but, needs_triton, no_reasons

_HERE = Path(__file__).parent
_EXACT = exact_but("bits")


def _run_ours(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dense_mla.fold_rows_triton").run(inputs))


def _run_torch(inputs: Inputs) -> Outputs:
    """Plain torch: tokens and groups of heads change places."""
    tokens, groups = inputs.query_tokens, inputs.query.shape[1] // HEADS
    requests = inputs.query.shape[0] // tokens
    query = inputs.query.unflatten(1, (groups, HEADS)).unflatten(0, (requests, tokens))

    def back(folded: torch.Tensor) -> torch.Tensor:
        split: torch.Tensor = folded.unflatten(0, (requests, groups, tokens))
        return split.movedim(1, 2).flatten(2, 3).flatten(0, 1)

    return Outputs(query.movedim(2, 1).flatten(0, 2), back(inputs.folded_out), back(inputs.folded_lse))


def _key(case: Case) -> str:
    assert isinstance(case, FoldCase)
    return f"{case.width} {case.dtype}"


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-triton",
        run=_run_ours,
        unsupported=needs_triton,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "fold_rows_triton.py"),
    ),
    Impl(
        name="torch-permute",
        run=_run_torch,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "fold_rows.py"),
    ),
)
