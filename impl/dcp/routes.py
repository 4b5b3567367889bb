"""Who decides which kernel a batch of dense MLA decode goes to, and what can each of them not be asked?"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import cast

import torch

from cases.case import Case
from cases.dcp.routes import COLUMNS, Batch, Configuration, Inputs, Outputs, RoutesCase, most_queries_of
from cases.dcp.verify_pages import tile_of
from impl.dcp import vllm_modules
from impl.implementation import Execution, Impl, bytes_of, exact_but, no_reasons
from impl.sources import settings, vllm

# Only the newer rules have this name.
NEWER_NAME = "_triton_dcp_verify_supported"

_HERE = Path(__file__).parent
_EXACT = exact_but("decisions")
_TWO_GIB = 2 * 1024**3


class _Refused(Exception):
    """The batch, or every batch, cannot be served; the argument is the code of the refusal."""


class _Server:
    """What one configuration comes to with a number of query heads; raises `_Refused` where there is none."""

    def __init__(self, given: Configuration, heads: int) -> None:
        self.given, self.heads = given, heads
        newer = given.rules == "automatic"
        # Every route for several queries over ranks counts positions in turns of one token.
        turns = given.ranks > 1 and given.interleave == 1
        wanted = newer or given.selector == "asm"
        self.native = 0
        rows = turns and given.segmented
        generic = turns and newer and given.arch == "gfx942"
        if turns and given.arch == "gfx950" and given.drafted and wanted:
            self.native = 16 << max(0, (heads - 1).bit_length() - 4) if heads <= 128 else 0
            if not self.native and not (newer and rows):
                raise _Refused(1)
        several = given.ranks == 1 or rows or generic or self.native > 0
        self.most = most_queries_of(given.drafted, given.parallel) if several else 1
        if generic:
            rows = rows and (heads <= 64 if given.cache == "float8" else tile_of(given.block_size) <= 64)
        self.row_route = 1 if rows else 3 if generic else 0

    def route(self, batch: Batch) -> int:
        """The code of the route."""
        if self.given.ranks == 1 or batch.queries == 1 or not batch.causal:
            return 0
        if self.native and batch.queries > 2:
            return 2
        if not self.row_route:
            raise _Refused(2)
        return self.row_route

    def gluon(self, batch: Batch) -> int:
        """1 or 2 where the small kernel for one or for several queries is taken."""
        given, mode = self.given, (self.given.mode or "auto").lower()
        if given.arch != "gfx950" or given.cache == "float8" or mode == "asm" or given.ranks > 1 or self.heads > 15:
            return 0
        if given.blocks is not None and given.blocks * given.block_bytes > _TWO_GIB:
            return 0
        if batch.queries > 1:
            return 2 if batch.causal else 0
        return 1 if mode == "gluon" or self.heads in (1, 2, 4, 8) else 0

    def decide(self, batch: Batch, longest: int) -> dict[str, int]:
        """The columns that are not 0."""
        given, route = self.given, self.route(batch)
        padded = (self.heads + 15) // 16 * 16
        if given.cache == "float8" and batch.queries == 2 and not batch.causal and padded not in (32, 64, 96, 128):
            raise _Refused(3)
        found = {"most_queries": self.most, "route": route, "gluon": self.gluon(batch)}
        cap = given.compute_units if self.native else 0
        if route == 2:
            found |= {"call_heads": self.native, "call_split_cap": cap}
        if route in (1, 3):
            period = given.ranks * given.interleave
            share = -(-given.longest_model // period) * given.interleave
            # Rank 0 holds the first turn of every round, in turns of one token.
            found["row_bound"] = share if given.graphs else max(1, -(-longest // given.ranks))
            found["page_size"] = tile_of(given.block_size) if route == 1 else given.block_size
            return found
        padded_block = batch.causal and given.cache != "float8" and self.heads < 16 and batch.queries > 4
        if not found["gluon"] and not padded_block and batch.queries <= self.most:
            found |= {
                "plan": 1, "plan_heads": self.native if route == 2 else padded, "plan_split_cap": cap,
                "plan_causal": int(batch.causal and route != 2), "plan_round_robin": int(route == 2),
            }  # fmt: skip
        return found


def _run_ours(inputs: Inputs) -> Outputs:
    for point, batch in enumerate(inputs.batches):
        try:
            found = _Server(inputs.configuration, batch.heads).decide(batch, max(inputs.lengths))
        except _Refused as refused:
            found = {"refused": refused.args[0]}
        inputs.out[point] = torch.tensor([found.get(name, 0) for name in COLUMNS])
    return Outputs(inputs.out)


def _run_vllm(inputs: Inputs) -> Outputs:
    return cast(Outputs, importlib.import_module("impl.dcp.routes_vllm").run(inputs))


@functools.cache
def _is_newer(path: Path | None) -> bool:
    return not vllm.unsupported(path, {vllm_modules.BACKEND: [NEWER_NAME]})


def _vllm_reasons(case: Case, execution: Execution) -> list[str]:
    del execution
    assert isinstance(case, RoutesCase)
    missing = vllm_modules.missing(vllm_modules.BACKEND, vllm_modules.BUILDER)
    if missing:
        return missing
    its = "automatic" if _is_newer(settings.vllm_path()) else "selector"
    return [] if case.rules == its else [f"rules={case.rules}: this vLLM has the rules {its}"]


def _key(case: Case) -> str:
    return case.op


IMPLS: tuple[Impl, ...] = (
    Impl(
        name="ours-host",
        run=_run_ours,
        unsupported=no_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=bytes_of(_HERE / "routes.py"),
    ),
    Impl(
        name="vllm-host",
        run=_run_vllm,
        unsupported=_vllm_reasons,
        precision=_EXACT,
        compile_key=_key,
        source=vllm_modules.fingerprint(vllm_modules.BACKEND),
    ),
)
