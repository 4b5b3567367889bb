"""Is the metadata of a decode batch judged rightly, and do our own routes build what was worked out by hand?"""

import dataclasses
import itertools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import memory
from cases.case import parse
from cases.dense_mla import decode_metadata as ask
from cases.dense_mla.batches import Batch
from cases.dense_mla.decode_metadata import Inputs, MetadataCase, Outputs
from cases.precision import Precision
from impl.dense_mla.batch_shape import shape_of
from impl.dense_mla.decode_metadata import IMPLS
from impl.sources import settings as sources
from oracle.dense_mla import decode_metadata as right

OURS, VLLM, TORCH = IMPLS
RUNS = pytest.mark.parametrize("run", [right.reference, OURS.run, TORCH.run], ids=["reference", OURS.name, TORCH.name])


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def batch(query_lens: list[int], tokens: int, keys: list[int], whole: list[int] | None = None) -> Batch:
    starts = [0, *itertools.accumulate(query_lens)]
    return Batch(tuple(query_lens), int32(starts), int32(keys), int32(whole or keys), tokens)


def two_dummies(**changes: object) -> Inputs:
    """Two requests of four tokens, and two dummies whose rows held 5 and 6 keys."""
    inputs = Inputs(
        batch=batch([4, 4, 0, 0], 16, [10, 7, 5, 6], [20, 13, 0, 0]), route="round_robin", world=2, graphs=True
    )
    return dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]


def lists(outputs: Outputs) -> dict[str, list[int]]:
    return {field.name: getattr(outputs, field.name).tolist() for field in dataclasses.fields(outputs)}


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


@RUNS
def test_hand_worked_padded_batch(run: object) -> None:
    assert lists(run(two_dummies())) == {  # type: ignore[operator]
        "padded_query": [4],
        "query": [4],
        "uniform": [4],
        "least_kv": [1],
        "qo_indptr": [0, 4, 8, 12, 16],
        "kernel_lens": [10, 7, 4, 4],
        "kv_indptr": [0, 10, 17, 21, 25],
        "last_page_lens": [1, 1, 1, 1],
        "global_indptr": [0, 20, 33, 41, 49],
        "global_lens": [20, 13, 0, 0],
    }


@RUNS
def test_hand_worked_batch_with_a_dummy_between(run: object) -> None:
    inputs = two_dummies(batch=batch([4, 0, 4, 0], 16, [10, 5, 7, 6], [20, 0, 13, 0]))
    assert lists(run(inputs)) == {  # type: ignore[operator]
        "padded_query": [0],
        "query": [4],
        "uniform": [-1],
        "least_kv": [1],
        "qo_indptr": [0, 4, 4, 8, 8],
        "kernel_lens": [10, 5, 7, 6],
        "kv_indptr": [0, 10, 15, 22, 28],
        "last_page_lens": [1, 1, 1, 1],
        "global_indptr": [0, 20, 20, 33, 33],
        "global_lens": [20, 0, 13, 0],
    }


@RUNS
@pytest.mark.parametrize(("graphs", "starts"), [(True, [0, 1, 1]), (False, [0, 1, 2])])
def test_single_tokens_go_by_the_query_starts_only_with_graphs(run: object, graphs: bool, starts: list[int]) -> None:
    inputs = two_dummies(batch=batch([1, 0], 2, [9, 3]), route="planned", graphs=graphs)
    assert run(inputs).qo_indptr.tolist() == starts  # type: ignore[operator]


@RUNS
@pytest.mark.parametrize(
    ("query_lens", "tokens", "least"),
    [([4, 4, 0, 0], 16, 7), ([0, 0, 0, 0], 16, 1), ([4, 4, 4, 4], 16, 2), ([4, 0, 4, 0], 16, 2), ([1, 1, 1, 1], 4, 1)],
    ids=["padded", "dummies-only", "uniform", "not-padded", "single-tokens"],
)
def test_the_lower_bound_leaves_a_padded_batchs_dummies_out(
    run: object, query_lens: list[int], tokens: int, least: int
) -> None:
    inputs = two_dummies(batch=batch(query_lens, tokens, [10, 7, 2, 3]), route="gluon", world=1)
    assert run(inputs).least_kv.tolist() == [least]  # type: ignore[operator]


@RUNS
def test_no_requests_give_empty_tables(run: object) -> None:
    outputs = lists(run(two_dummies(batch=batch([], 0, []), route="planned", world=1)))  # type: ignore[operator]
    assert outputs["qo_indptr"] == outputs["kv_indptr"] == [0]
    assert outputs["kernel_lens"] == outputs["last_page_lens"] == outputs["global_indptr"] == []
    assert outputs["padded_query"] == outputs["query"] == outputs["uniform"] == [0]


@pytest.mark.parametrize(
    ("query_lens", "tokens", "padded"),
    [
        ([4, 4, 0, 0], 16, 4),
        ([4, 0, 4, 0], 16, 0),
        ([4, 2, 0, 0], 16, 0),
        ([1, 0], 2, 0),
        ([4, 4], 8, 0),
        ([0, 0], 6, 3),
        ([0, 0], 0, 0),
        ([0, 0], 2, 0),
        ([3, 0], 8, 0),
        ([4, 0, 0], 16, 0),
        ([2, 2], 8, 0),
        ([], 8, 0),
    ],
)
def test_only_dummies_behind_equal_requests_are_padding(query_lens: list[int], tokens: int, padded: int) -> None:
    assert right.padded_query(query_lens, tokens) == padded
    shape = shape_of(query_lens, tokens)
    assert (shape.query if shape.padded else 0) == padded


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 26))
def test_padding_is_a_prefix_of_equal_requests_and_the_rows_they_all_would_need(
    query_lens: list[int], tokens: int
) -> None:
    candidates = [
        query
        for query in range(2, 27)
        for live in range(len(query_lens))
        if query_lens == [query] * live + [0] * (len(query_lens) - live) and tokens == query * len(query_lens)
    ]
    assert right.padded_query(query_lens, tokens) == (candidates[0] if candidates else 0)


def test_uniform_starts_step_by_the_query() -> None:
    assert right.uniform_starts(3, 4) == [0, 4, 8, 12] and right.uniform_starts(0, 4) == [0]
    with pytest.raises(ValueError, match="query=0: should be at least 1"):
        right.uniform_starts(3, 0)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("query", [1, 2, 5])
def test_every_rank_holds_a_query_of_a_dummys_global_length(query: int, rank: int) -> None:
    world = 3
    assert len([p for p in range(query * world) if p % world == rank]) == query
    others = [length for length in range(100) if all(len(range(r, length, world)) == query for r in range(world))]
    assert others == [query * world]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"query_start": int32([0, 4, 8, 8, 9])}, r"query_start=\[0, 4, 8, 8, 9\]: should be \[0, 4, 8, 8, 8\]"),
        ({"seq_lens": int32([1, 2, 3])}, "seq_lens=3 lengths: should be 4"),
        ({"global_lens": int32([1])}, "global_lens=1 lengths: should be 4"),
    ],
)
def test_malformed_batches_are_named(changes: dict[str, torch.Tensor], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        right.reference(two_dummies(batch=dataclasses.replace(two_dummies().batch, **changes)))


def test_every_part_of_the_metadata_is_judged() -> None:
    inputs = two_dummies()
    for field in dataclasses.fields(Outputs):
        outputs = right.reference(inputs)
        getattr(outputs, field.name)[-1] += 1
        assert not passes(inputs, outputs), field.name


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(ask.AXES["kind"]), st.sampled_from(["planned", "round_robin"]))
def test_our_kernel_agrees_with_the_reference(seed: int, kind: str, route: str) -> None:
    case = MetadataCase(kind=kind, route=route, world=3, query=4, layout="strided", seed=seed)  # type: ignore[arg-type]
    inputs = ask.build(case)
    assert passes(inputs, OURS.run(memory.on_device(inputs, "cpu")))


def test_row_starts_go_on_over_tiles() -> None:
    inputs = ask.build(MetadataCase(kind="padded", requests=2100, query=2, route="planned"))
    assert passes(inputs, OURS.run(memory.on_device(inputs, "cpu")))


@pytest.mark.parametrize("mutant", right.MUTANTS, ids=lambda mutant: mutant.name)
def test_wrong_metadata_is_told_from_right(mutant: right.Mutant) -> None:
    kinds = [
        MetadataCase(kind=kind, query=4, dummies="most", world=world, route=route, lengths="short", graphs=False)  # type: ignore[arg-type]
        for kind in ask.AXES["kind"]
        for route, world in (("planned", 2), ("round_robin", 2), ("gluon", 1))
    ]
    kinds.append(MetadataCase(layout="strided"))
    for case in [*map(parse, ask.REGRESSIONS), *kinds]:
        inputs = ask.build(case)  # type: ignore[arg-type]
        answer = mutant.answer(inputs)
        if answer is not None and not passes(inputs, answer):
            return
    pytest.fail("no case tells it from the right answer")


needs_vllm = pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("case", [MetadataCase(), *map(parse, ask.REGRESSIONS)], ids=str)
def test_vllm_builds_the_metadata(case: MetadataCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    inputs = ask.build(case)
    assert VLLM.unsupported(case, "interpreter") == []
    assert passes(inputs, VLLM.run(memory.on_device(inputs, "cpu")))


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    reasons = VLLM.unsupported(MetadataCase(kind="uniform", requests=0), "interpreter")
    assert "is not a vLLM tree" in reasons[0]
    assert reasons[1] == "requests=0: vLLM builds no metadata for a batch that decodes nothing"
