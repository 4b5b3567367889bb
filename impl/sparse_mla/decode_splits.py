"""Who decides into how many splits sparse MLA decode cuts its keys, and what can each of them not be asked?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from cases.case import Case
from cases.precision import Precision
from cases.sparse_mla.decode_splits import Inputs, Outputs, SplitsCase
from impl.implementation import Execution, Impl
from impl.sources import settings, vllm
from impl.sparse_mla import splits as split_rules
from impl.sparse_mla.decode import VLLM_HEURISTICS, VLLM_MODULE, vllm_loader, vllm_source

VLLM_UNQUANTISED = "rocm_sparse_decode_bf16_num_splits"

_HERE = Path(__file__).parent


def _points(inputs: Inputs) -> list[tuple[int, int, int, int, int, int]]:
    columns = (
        inputs.queries, inputs.heads, inputs.main_capacity, inputs.extra_capacity, inputs.main_length,
        inputs.extra_length,
    )  # fmt: skip
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _answered(inputs: Inputs, count: Callable[[tuple[int, int, int, int, int, int]], int]) -> Outputs:
    inputs.out.copy_(torch.tensor([count(point) for point in _points(inputs)], dtype=torch.int64))
    return Outputs(inputs.out)


def run_ours(inputs: Inputs) -> Outputs:
    """The counts of `impl.sparse_mla.splits`."""

    def count(point: tuple[int, int, int, int, int, int]) -> int:
        queries, heads, main, extra, main_length, extra_length = point
        if inputs.rule == "bfloat16_cache":
            return split_rules.bfloat16_cache_count(inputs.arch, queries, heads, main_length, inputs.compute_units)
        load = split_rules.load_of(queries, heads, main, extra, inputs.compute_units)
        launched = split_rules.split_count(inputs.arch, load)
        asked = inputs.rule == "adaptive"
        if not split_rules.is_adaptive(inputs.arch, asked, load, launched):
            return launched
        one_wave = split_rules.one_wave_count(load, launched)
        return split_rules.adaptive_count(main_length, extra_length, launched, one_wave)

    return _answered(inputs, count)


def run_vllm(inputs: Inputs) -> Outputs:
    """What vLLM's host functions say of a device with that many compute units."""
    loader = vllm_loader(inputs.arch, inputs.out.device)
    rule = loader.symbol(VLLM_MODULE, _function(inputs.rule, inputs.arch))

    def count(point: tuple[int, int, int, int, int, int]) -> int:
        queries, heads, main, extra, main_length, _ = point
        if inputs.rule == "bfloat16_cache":
            return int(rule(queries, heads, main_length))
        over = max(1, queries)
        return int(rule(queries, -(-heads // split_rules.HEADS_PER_PROGRAM), main / over, extra / over, 32))

    with loader.compute_units(inputs.compute_units):
        return _answered(inputs, count)


def _function(rule: str, arch: str) -> str:
    return VLLM_UNQUANTISED if rule == "bfloat16_cache" else VLLM_HEURISTICS[arch]


@functools.cache
def _missing(path: Path | None, name: str) -> tuple[str, ...]:
    return tuple(vllm.unsupported(path, {VLLM_MODULE: (name,)}))


def _no_reason(case: Case, execution: Execution) -> list[str]:
    del case, execution
    return []


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    assert isinstance(case, SplitsCase)
    del execution
    if case.rule == "adaptive":
        return ["rule=adaptive: vLLM's kernel chooses on the device and tells nobody"]
    if case.rule == "decode" and case.arch not in VLLM_HEURISTICS:
        return [f"arch={case.arch}: vLLM has no split route there, so no rule"]
    return list(_missing(settings.vllm_path(), _function(case.rule, case.arch)))


def _exact(case: Case, execution: Execution) -> Precision:
    del case, execution
    return Precision(probability="exact", note="integers")


def _key(case: Case) -> str:
    return case.op


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-host",
        run=run_ours,
        unsupported=_no_reason,
        precision=_exact,
        compile_key=_key,
        source=lambda: (_HERE / "splits.py").read_bytes(),
    ),
    Impl(
        name="vllm-host",
        run=run_vllm,
        unsupported=_vllm_reasons,
        precision=_exact,
        compile_key=_key,
        source=vllm_source,
    ),
)
