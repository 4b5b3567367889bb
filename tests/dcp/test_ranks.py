"""Does a group of processes answer, and does what goes wrong in one become a sentence instead of a hang?"""

import multiprocessing
import time
from collections.abc import Iterator

import pytest
import torch

from impl.dcp import collectives, ranks
from impl.dcp.collectives import Request
from impl.dcp.ranks import Call, RanksError


@pytest.fixture(autouse=True)
def nobody_left_behind() -> Iterator[None]:
    yield
    assert not multiprocessing.active_children()


def test_every_rank_answers_its_own_call() -> None:
    calls = [Call("operator", "mul", (rank, 10)) for rank in range(3)]
    assert ranks.answers(calls, "cpu") == [0, 10, 20]


def test_a_tensor_arrives_with_its_strides_and_what_lies_between() -> None:
    storage = torch.arange(24, dtype=torch.float32)
    view = storage.as_strided((3, 2), (8, 2), 4)
    strided, flat = ranks.answers(
        [Call("copy", "copy", (view,)), Call("cases.memory", "storage_bytes", (view,))], "cpu"
    )  # fmt: skip
    assert strided.stride() == (8, 2) and torch.equal(strided, view)
    assert torch.equal(flat.view(torch.float32), storage)


def test_a_rank_that_raises_is_named() -> None:
    calls = [Call("math", "sqrt", (4.0,)), Call("math", "sqrt", (-1.0,))]
    with pytest.raises(RanksError, match="rank 1 of 2 raised ValueError: math domain error"):
        ranks.answers(calls, "cpu")


def test_a_rank_that_dies_is_named() -> None:
    calls = [Call("time", "sleep", (30.0,)), Call("os", "_exit", (7,))]
    began = time.monotonic()
    with pytest.raises(RanksError, match="rank 1 of 2 ended with exit code 7 before it answered"):
        ranks.answers(calls, "cpu")
    assert time.monotonic() - began < 25


def test_a_rank_that_hangs_is_named_in_time() -> None:
    calls = [Call("math", "sqrt", (4.0,)), Call("time", "sleep", (60.0,))]
    with pytest.raises(RanksError, match="rank 1 of 2 did not answer within 3 seconds"):
        ranks.answers(calls, "cpu", seconds=3)


def test_a_module_that_is_not_there_is_the_ranks_error() -> None:
    with pytest.raises(RanksError, match="rank 0 of 1 raised ModuleNotFoundError"):
        ranks.answers([Call("no_such_module", "run", ())], "cpu")


def asking(rank: int) -> collectives.Rank[list[float]]:
    gathered = yield Request("all_gather", torch.full((1,), float(rank)))
    total = yield Request("all_reduce", gathered)
    run = yield Request("reduce_scatter", torch.arange(6.0).view(1, 6) + rank)
    received = yield Request("all_to_all", torch.arange(3.0) + 10 * rank)
    return [*total.flatten().tolist(), *run.flatten().tolist(), *received.tolist()]


def test_collectives_of_one_process_are_those_of_a_group() -> None:
    # 0 + 1 + 2 of the second dimension's runs, and entry r of every rank.
    assert collectives.in_this_process([asking(rank) for rank in range(3)]) == [
        [0.0, 3.0, 6.0, 3.0, 6.0, 0.0, 10.0, 20.0],
        [0.0, 3.0, 6.0, 9.0, 12.0, 1.0, 11.0, 21.0],
        [0.0, 3.0, 6.0, 15.0, 18.0, 2.0, 12.0, 22.0],
    ]


def other(_rank: int) -> collectives.Rank[int]:
    yield Request("all_reduce", torch.zeros(1))
    return 0


def test_ranks_that_ask_for_different_things_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="did not ask for the same collectives"):
        collectives.in_this_process([asking(0), other(1)])  # type: ignore[list-item]


def test_sums_are_rounded_after_every_addition_in_the_order_of_the_ranks() -> None:
    def adding(value: float) -> collectives.Rank[float]:
        total = yield Request("all_reduce", torch.tensor([value], dtype=torch.bfloat16))
        return float(total)

    # 256 + 1 is 256 in bfloat16, twice.
    assert collectives.in_this_process([adding(value) for value in (256.0, 1.0, 1.0)]) == [256.0] * 3
    assert collectives.in_this_process([adding(value) for value in (1.0, 1.0, 256.0)]) == [258.0] * 3
