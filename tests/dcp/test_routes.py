"""Does every batch of dense MLA decode find the kernel that can serve it?"""

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.case import parse
from cases.dcp import routes as ask
from cases.dcp.routes import COLUMNS, ROUTES, Batch, Configuration, Inputs, Outputs, RoutesCase
from cases.precision import Precision
from impl.dcp.routes import IMPLS
from impl.sources import settings
from oracle.dcp import routes as right

OURS, VLLM = IMPLS
RUNS = [pytest.param(right.reference, id="reference"), pytest.param(OURS.run, id="ours-host")]
TWO_GIB = 1 << 31

# gfx950, one rank, seven drafted tokens, a small cache, newer rules.
PLAIN = Configuration(
    rules="automatic", selector="asm", arch="gfx950", mode="auto", cache="bfloat16", ranks=1, interleave=1,
    segmented=True, drafted=7, parallel=False, blocks=100, block_bytes=1 << 16, block_size=16, layers=61, graphs=False,
    longest_model=1000, compute_units=256,
)  # fmt: skip


def of(run: Any, heads: int, queries: int, causal: bool = True, **changes: Any) -> dict[str, int]:
    """The decision for one batch of two requests of 301 and 77 tokens."""
    inputs = Inputs(
        configuration=dataclasses.replace(PLAIN, **changes), lengths=(301, 77),
        batches=(Batch(heads, queries, causal),), out=torch.full((1, len(COLUMNS)), 99),
    )  # fmt: skip
    return dict(zip(COLUMNS, run(inputs).out[0].tolist(), strict=True))


def route(run: Any, **given: Any) -> str:
    """The route's name, or `refused`."""
    found = of(run, **given)
    return "refused" if found["refused"] else ROUTES[found["route"]]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("rows", "causal", "queries", "asm", "expected"),
    [
        (True, True, 1, True, "plain"),
        (True, True, 2, True, "segmented"),
        (True, True, 3, True, "round_robin"),
        (True, True, 4, False, "segmented"),
        (True, False, 2, True, "plain"),
        (True, False, 4, False, "plain"),
        (False, True, 3, True, "round_robin"),
        (False, True, 2, True, "refused"),
        (False, True, 8, False, "refused"),
        (False, False, 8, False, "plain"),
        (False, True, 1, False, "plain"),
    ],
)
def test_the_route_of_a_batch_over_ranks(
    run: Any, rows: bool, causal: bool, queries: int, asm: bool, expected: str
) -> None:
    older = {"rules": "selector", "selector": "asm" if asm else "segmented"}
    given = {"heads": 64, "queries": queries, "causal": causal, "ranks": 4, "segmented": rows}
    assert route(run, **given, **older) == expected
    # A single rank is plain whatever there is.
    assert route(run, **{**given, "ranks": 1}, **older) == "plain"


@pytest.mark.parametrize("run", RUNS)
def test_a_causal_block_over_ranks_is_never_plain(run: Any) -> None:
    for arch, rows, interleave, queries, rules in itertools.product(
        ("gfx942", "gfx950", "other"), (True, False), (1, 16), range(2, 10), ("selector", "automatic")
    ):
        given = {"arch": arch, "segmented": rows, "interleave": interleave, "queries": queries, "rules": rules}
        found = route(run, heads=32, ranks=2, **given)
        assert found != "plain"
        # No route counts positions in turns of more than one token.
        assert interleave == 1 or found == "refused"


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("most", "queries", "heads", "cache", "planned"),
    [
        (1, 1, 16, "bfloat16", True), (4, 2, 16, "bfloat16", True), (2, 4, 16, "bfloat16", False),
        (1, 1, 8, "bfloat16", False), (4, 4, 8, "bfloat16", False), (1, 1, 12, "bfloat16", True),
        (8, 8, 12, "bfloat16", False), (1, 1, 8, "float8", True), (8, 8, 12, "float8", True),
        (1, 1, 24, "bfloat16", True),
    ],
)  # fmt: skip
def test_what_is_planned_on_gfx950(run: Any, most: int, queries: int, heads: int, cache: str, planned: bool) -> None:
    assert of(run, heads, queries, drafted=most - 1, cache=cache)["plan"] == planned


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("most", "queries", "heads", "cache", "planned"),
    [
        (4, 4, 12, "bfloat16", True), (8, 8, 12, "bfloat16", False), (8, 8, 16, "bfloat16", True),
        (8, 8, 12, "float8", True),
    ],
)  # fmt: skip
def test_what_is_planned_without_gluon(
    run: Any, most: int, queries: int, heads: int, cache: str, planned: bool
) -> None:
    for given in ({"arch": "gfx942"}, {"mode": "asm"}):
        assert of(run, heads, queries, drafted=most - 1, cache=cache, **given)["plan"] == planned


@pytest.mark.parametrize("run", RUNS)
def test_a_long_block_without_mask_keeps_its_plan(run: Any) -> None:
    found = of(run, 12, 8, causal=False)
    assert (found["gluon"], found["plan"], found["plan_causal"], found["plan_heads"]) == (0, 1, 0, 16)


@pytest.mark.parametrize("run", RUNS)
def test_gluon_takes_few_heads_within_2_gib(run: Any) -> None:
    assert [heads for heads in range(1, 18) if of(run, heads, 1)["gluon"]] == [1, 2, 4, 8]
    assert [heads for heads in range(1, 18) if of(run, heads, 1, mode="GLUON")["gluon"]] == list(range(1, 16))
    assert [heads for heads in range(1, 18) if of(run, heads, 4)["gluon"] == 2] == list(range(1, 16))
    assert of(run, 8, 4, causal=False)["gluon"] == 0
    for blocks, taken in ((None, 1), (TWO_GIB - 1, 1), (TWO_GIB, 1), (TWO_GIB + 1, 0)):
        assert of(run, 8, 1, blocks=blocks, block_bytes=1)["gluon"] == taken
    for given in ({"mode": "asm"}, {"arch": "gfx942", "mode": "gluon"}, {"cache": "float8", "mode": "gluon"}):
        assert of(run, 8, 1, **given)["gluon"] == 0
    assert of(run, 8, 1, mode=None)["gluon"] == of(run, 8, 1, mode="")["gluon"] == 1


@pytest.mark.parametrize("run", RUNS)
def test_gluon_is_not_taken_where_ranks_need_a_log_sum_exp(run: Any) -> None:
    found = of(run, 8, 1, ranks=2)
    assert (found["gluon"], found["plan"], found["plan_heads"]) == (0, 1, 16)


@pytest.mark.parametrize("run", RUNS)
def test_round_robin_pads_its_plan_and_plain_batches_share_its_cap(run: Any) -> None:
    found = of(run, 96, 4, ranks=8)
    told = {name: found[name] for name in COLUMNS if name.startswith(("plan", "call"))}
    assert told == {
        "plan": 1, "plan_heads": 128, "plan_causal": 0, "plan_round_robin": 1, "plan_split_cap": 256, "call_heads": 128,
        "call_split_cap": 256,
    }  # fmt: skip
    plain = of(run, 96, 1, ranks=8)
    assert (plain["plan_heads"], plain["plan_causal"], plain["plan_split_cap"], plain["call_split_cap"]) == (
        96,
        1,
        256,
        0,
    )
    assert of(run, 96, 1, ranks=8, drafted=0)["plan_split_cap"] == 0


def test_head_counts_of_the_kernels() -> None:
    assert [right.round_robin_heads(heads) for heads in (1, 16, 17, 64, 65, 96, 128, 129)] == [
        16, 16, 32, 64, 128, 128, 128, 0,
    ]  # fmt: skip
    assert [right.kernel_heads(heads) for heads in (1, 16, 17, 24, 96, 97)] == [16, 16, 32, 32, 96, 112]


@pytest.mark.parametrize("run", RUNS)
def test_two_unmasked_queries_over_a_quantised_cache_need_a_kernel(run: Any) -> None:
    found = [heads for heads in range(1, 129) if not of(run, heads, 2, causal=False, cache="float8")["refused"]]
    assert found == [*range(17, 33), *range(49, 65), *range(81, 97), *range(113, 129)]
    assert not of(run, 16, 2, causal=False)["refused"]
    assert not of(run, 16, 3, causal=False, cache="float8")["refused"]
    assert of(run, 16, 2, causal=False, cache="float8", ranks=2)["refused"] == 3


@pytest.mark.parametrize("run", RUNS)
def test_too_many_heads_for_round_robin(run: Any) -> None:
    given = {"heads": 144, "queries": 4, "ranks": 3}
    assert of(run, **given, rules="selector")["refused"] == 1
    assert route(run, **given, rules="selector", selector="segmented") == "segmented"
    assert route(run, **given) == "segmented"
    assert of(run, **given, segmented=False)["refused"] == 1


@pytest.mark.parametrize("run", RUNS)
def test_rows_that_do_not_fit_into_gfx942(run: Any) -> None:
    small = {"arch": "gfx942", "ranks": 2, "queries": 4}
    assert route(run, heads=64, cache="float8", **small) == "segmented"
    assert route(run, heads=66, cache="float8", **small) == "generic"
    assert route(run, heads=16, block_size=96, **small) == "segmented"
    found = of(run, heads=16, block_size=1536, **small)
    assert (ROUTES[found["route"]], found["page_size"]) == ("generic", 1536)
    # The older rules know nothing of it.
    assert of(run, heads=16, block_size=1536, rules="selector", **small)["page_size"] == 128
    assert route(run, heads=16, segmented=False, **small) == "generic"


@pytest.mark.parametrize("run", RUNS)
def test_the_bound_of_rows(run: Any) -> None:
    given = {"heads": 16, "queries": 2, "ranks": 2}
    # Rank 0 holds 151 of 301 tokens, and half of the longest model's.
    assert of(run, **given)["row_bound"] == 151
    assert of(run, **given, graphs=True)["row_bound"] == 500
    assert of(run, **given, graphs=True, longest_model=1001)["row_bound"] == 501
    assert of(run, **{**given, "queries": 1})["row_bound"] == 0


@pytest.mark.parametrize("run", RUNS)
def test_how_many_queries_decode(run: Any) -> None:
    assert [of(run, 16, 1, drafted=drafted)["most_queries"] for drafted in (0, 1, 7)] == [1, 2, 8]
    assert of(run, 16, 1, drafted=3, parallel=True)["most_queries"] == 7
    assert of(run, 16, 1, ranks=2, interleave=16)["most_queries"] == 1
    assert of(run, 16, 1, ranks=2, segmented=False, arch="other")["most_queries"] == 1


@pytest.mark.parametrize("text", ask.REGRESSIONS)
def test_ours_decides_as_the_rules_do(text: str) -> None:
    case = parse(text)
    assert isinstance(case, RoutesCase)
    checks = right.judge(ask.build(case), OURS.run(ask.build(case)), Precision())
    assert [str(check) for check in checks if not check.passed] == []


def test_a_wrong_decision_names_the_batch() -> None:
    inputs = ask.build(RoutesCase())
    out = right.reference(inputs).out
    point = inputs.batches.index(Batch(16, 2, True))
    out[point, COLUMNS.index("route")] = 0
    check = right.judge(inputs, Outputs(out), Precision())[COLUMNS.index("route")]
    assert str(check) == (
        f"route[{point}]=0, but should be 1: 16 heads, 2 causal queries (segmented); 1 of 180 elements differ"
    )


@pytest.mark.parametrize(
    ("changes", "heads", "queries", "message"),
    [
        ({"selector": "fast"}, 16, 1, "selector='fast': should be asm or segmented"),
        ({"ranks": 0}, 16, 1, "ranks=0, interleave=1: should be 1 or more"),
        ({"interleave": 0}, 16, 1, "should be 1 or more"),
        ({}, 130, 1, "heads=130: should be up to 128 or a multiple of 16"),
        ({}, 0, 1, "heads=0: should be"),
        ({"ranks": 3}, 16, 1, "heads=16: should be .* 3 times those of a rank"),
        ({}, 16, 0, "queries=0: should be 1 or more"),
    ],
)
def test_calls_that_make_no_sense_are_refused(changes: dict[str, Any], heads: int, queries: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of(right.reference, heads, queries, **changes)


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path / "nowhere")
    assert "does not exist" in VLLM.unsupported(RoutesCase(), "interpreter")[0]


@pytest.mark.vllm
@pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")
class TestRealVllm:
    """Facts about vLLM's own code."""

    @pytest.fixture(autouse=True)
    def _real_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(settings, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))

    def test_it_has_the_newer_rules(self) -> None:
        assert VLLM.unsupported(RoutesCase(), "interpreter") == []
        assert VLLM.unsupported(RoutesCase(rules="selector"), "interpreter") == [
            "rules=selector: this vLLM has the rules automatic"
        ]

    def test_its_builder_decides_the_same_but_for_gluon_over_ranks(self) -> None:
        (lost,) = (mutant for mutant in right.MUTANTS if mutant.name == "gluon-without-log-sum-exp")
        for case in (RoutesCase(), RoutesCase(arch="gfx942", heads="many", cache="float8"), RoutesCase(ranks=1)):
            inputs = ask.build(case)
            answer = VLLM.run(ask.build(case))
            wrong = lost.answer(inputs)
            assert wrong is not None and torch.equal(answer.out, wrong.out)
