"""Is whatever a suspect does told as its own doing, and does it leave the process as it was?"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases.case import case_type
from impl.implementation import implementations

OP = "dense_mla.merge_parts"
OURS = implementations(OP)[0]
CASE = case_type(OP)()

Verdict = Callable[..., tuple[str, list[str]]]


class Cancelled(BaseException):
    """As asyncio's, which is no Exception."""


def cancelled(inputs: Any) -> Any:
    raise Cancelled("no more")


def with_(**fields: Any) -> Callable[[Any], Any]:
    return lambda inputs: dataclasses.replace(OURS.run(inputs), **fields)


@pytest.mark.parametrize(
    ("suspect", "reason"),
    [
        (with_(out=[1.0]), "out=list, but should be a tensor"),
        (with_(lse=1.5), "lse=float, but should be a tensor"),
        (with_(out=None), "out=NoneType, but should be a tensor"),
        (lambda inputs: None, "run returned NoneType, but should return cases.dense_mla.merge_parts."),
        (
            lambda inputs: SimpleNamespace(out=inputs.out),
            "run returned types.SimpleNamespace, but should return cases.",
        ),
        (lambda inputs: type(OURS.run(inputs)), "run returned type, but should return cases.dense_mla.merge_parts."),
        (cancelled, "Cancelled: no more (test_suspects.py:"),
        (
            lambda inputs: dataclasses.replace(OURS.run(inputs), out=OURS.run(inputs).out.clone()),
            "out: the answer lies in memory of its own, but should lie in what the caller gave to be written",
        ),
    ],
)
def test_what_is_no_answer_is_the_suspects_error(verdict: Verdict, suspect: Callable[[Any], Any], reason: str) -> None:
    status, reasons = verdict(CASE, dataclasses.replace(OURS, run=suspect))
    assert (status, len(reasons)) == ("error", 1)
    assert reasons[0].startswith(reason)


def test_an_answer_in_memory_of_its_own_is_one_where_that_is_declared(verdict: Verdict) -> None:
    def copied(inputs: Any) -> Any:
        answer = OURS.run(inputs)
        return dataclasses.replace(answer, out=answer.out.clone())

    assert verdict(CASE, dataclasses.replace(OURS, run=copied, allocates=True)) == ("pass", [])


def test_what_a_suspect_sets_for_the_process_is_undone(verdict: Verdict) -> None:
    def meddling(inputs: Any) -> Any:
        answer = OURS.run(inputs)
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        torch.set_flush_denormal(True)
        return answer

    assert verdict(CASE, dataclasses.replace(OURS, run=meddling)) == ("pass", [])
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.get_default_dtype() == torch.float32
    assert float(torch.tensor(2.0**-140) * 1.0) == 2.0**-140
    assert verdict(CASE, OURS) == ("pass", [])
