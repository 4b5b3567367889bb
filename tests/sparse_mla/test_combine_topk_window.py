"""Are rows of workspace indices judged rightly, and do our own routes build the right ones?"""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import memory
from cases.covering import sweep_cases
from cases.precision import Precision
from cases.sparse_mla import combine_topk_window as ask
from cases.sparse_mla.combine_topk_window import CombineCase, Inputs, Outputs
from impl.implementation import Impl
from impl.sources import settings as sources
from impl.sparse_mla.combine_topk_window import IMPLS
from oracle.sparse_mla import combine_topk_window as right
from reports.laws import break_of


def drawn(choose: random.Random) -> CombineCase:
    while True:
        axes = {axis: choose.choice(values) for axis, values in ask.AXES.items()}
        case = CombineCase(**axes, seed=choose.randrange(99))  # type: ignore[arg-type]
        if not ask.forbid(case) and not ask.heavy(case) and case.requests * case.queries < 300:
            return case


SWEEP = [case for case in sweep_cases(ask.CASE.op, "default") if isinstance(case, CombineCase) and not ask.heavy(case)]
OURS, DENSE, VLLM, VLLM_V4, VLLM_V4_ROCM, VLLM_TORCH = IMPLS


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def two_requests(**changes: object) -> Inputs:
    """Two queries of five tokens, four of them gathered, and three queries of a new request; batch rows start at 13."""
    inputs = Inputs(
        combined=torch.zeros(5, 128, dtype=torch.int32),
        lens=torch.zeros(5, dtype=torch.int32),
        topk=int32([[1, -1], [0, 4], [7, 7], [0, 3], [0, 2]]),
        query_start=int32([13, 15, 18]),
        seq_lens=int32([5, 3]),
        gather_lens=int32([4, 3]),
        window=3,
        ratio=2,
        top_k=2,
        request_rows=20,
        compressed_rows=4,
    )
    return dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]


def rows_of(outputs: Outputs) -> list[list[int]]:
    assert bool((outputs.combined[:, 6:] == -1).all())
    return [row[:6] for row in outputs.combined.tolist()]


@pytest.mark.parametrize("run", [right.reference, OURS.run, DENSE.run], ids=["reference", OURS.name, DENSE.name])
def test_hand_worked_rows(run: object) -> None:
    outputs = run(two_requests())  # type: ignore[operator]
    # Position 3 sees entries 1 and none, and tokens 1 to 3, of which token 1 is the first gathered, row 4. Position 4
    # has an entry 4 that is none. The new request starts at row 20, its tokens at row 24; position 0 has no entry yet.
    assert rows_of(outputs) == [
        [1, -1, 4, 5, 6, -1],
        [0, -1, 5, 6, 7, -1],
        [24, -1, -1, -1, -1, -1],
        [20, 24, 25, -1, -1, -1],
        [20, 24, 25, 26, -1, -1],
    ]
    assert outputs.lens.tolist() == [5, 5, 1, 3, 4]


@pytest.mark.parametrize("run", [right.reference, OURS.run, DENSE.run], ids=["reference", OURS.name, DENSE.name])
def test_a_layer_without_compressed_entries_has_the_window_only(run: object) -> None:
    outputs = run(two_requests(ratio=0))  # type: ignore[operator]
    assert rows_of(outputs)[0] == [4, 5, 6, -1, -1, -1]
    assert outputs.lens.tolist() == [3, 3, 1, 2, 3]


@pytest.mark.parametrize("run", [right.reference, OURS.run, DENSE.run], ids=["reference", OURS.name, DENSE.name])
def test_queries_before_the_first_token_have_empty_rows(run: object) -> None:
    # Three queries of a request with one token lie at -2, -1 and 0; the gather begins two before the sequence does.
    outputs = run(two_requests(seq_lens=int32([5, 1])))  # type: ignore[operator]
    assert rows_of(outputs)[2:] == [[-1] * 6, [-1] * 6, [26, -1, -1, -1, -1, -1]]
    assert outputs.lens.tolist() == [5, 5, 0, 0, 1]


def scalar(inputs: Inputs) -> tuple[list[list[int]], list[int]]:
    """Rows and lengths by counting positions one by one."""
    rows, lens = [], []
    starts, gather = inputs.query_start.tolist(), inputs.gather_lens.tolist()
    width = (inputs.top_k + inputs.window + 127) // 128 * 128
    for request, seq in enumerate(inputs.seq_lens.tolist()):
        for position in range(seq - (starts[request + 1] - starts[request]), seq):
            row: list[int] = []
            for entry in inputs.topk[len(rows)].tolist()[: inputs.top_k]:
                complete = inputs.ratio > 0 and (len(row) + 1) * inputs.ratio <= position + 1
                if not complete:
                    break
                row.append(entry + request * inputs.request_rows if 0 <= entry < inputs.compressed_rows else -1)
            for token in range(position + 1):
                if token > position - inputs.window:
                    held = token - (seq - gather[request])
                    row.append(request * inputs.request_rows + inputs.compressed_rows + held)
            lens.append(len(row))
            rows.append(row + [-1] * (width - len(row)))
    return rows, lens


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_the_reference_agrees_with_counting(seed: int) -> None:
    inputs = ask.build(drawn(random.Random(seed)))
    outputs = right.reference(inputs)
    rows, lens = scalar(inputs)
    assert outputs.combined.tolist() == rows
    assert outputs.lens.tolist() == lens


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_every_index_lies_in_its_request_and_window_rows_are_consecutive(seed: int) -> None:
    inputs = ask.build(drawn(random.Random(seed)))
    outputs = right.reference(inputs)
    queries = inputs.query_start[1:] - inputs.query_start[:-1]
    owner = torch.repeat_interleave(torch.arange(queries.numel()), queries.long())
    used = outputs.combined >= 0
    inside = torch.div(outputs.combined, max(inputs.request_rows, 1), rounding_mode="floor") == owner[:, None]
    assert bool((inside | ~used).all())
    last = outputs.combined.gather(1, (outputs.lens[:, None] - 1).clamp(min=0).long())[:, 0]
    own = inputs.request_rows * owner + inputs.compressed_rows + inputs.gather_lens[owner]
    rank = torch.arange(owner.numel()) - (inputs.query_start[1:] - inputs.query_start[0])[owner]
    # The last column that counts is the query's own token, counted from the end of the gathered ones.
    assert torch.equal(last[outputs.lens > 0].long(), (own + rank)[outputs.lens > 0].long())


def test_every_law_can_be_broken() -> None:
    mutants = {mutant.name: mutant for mutant in right.MUTANTS}
    wrong = {
        "M26": "base-not-subtracted",
        "M14": "request-start-ignored",
        "M19": "base-not-subtracted",
        "C1": "request-start-ignored",
        "C2": "gather-start-ignored",
        "C3": "stale-entries",
        "C4": "invalid-shifted",
    }
    inputs = ask.build(CombineCase(requests=4, queries=20, lengths="full", prefix="short", invalid="front"))
    for law in right.LAWS:
        answer = mutants[wrong[law.name.split()[0]]].answer
        broken = break_of(law, inputs, answer(inputs), answer, right.judge, Precision())
        assert broken is not None and not all(check.passed for check in broken), law.name


def test_a_failure_names_the_column() -> None:
    inputs = two_requests()
    outputs = right.reference(inputs)
    outputs.combined[1, 2] = 4
    failed = [str(check) for check in right.judge(inputs, outputs, Precision()) if not check.passed]
    assert failed == [
        "combined[1, 2]=4, but should be 5: a query has one row of workspace indices; 1 of 640 elements differ"
    ]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"query_start": int32([13, 18])}, "query_start has 2 entries: should be 3 for 2 requests"),
        ({"gather_lens": int32([4])}, "gather_lens has 1 entries: should be 2 for 2 requests"),
        ({"query_start": int32([13, 15, 17])}, "topk has 5 rows: should be 4, the number of queries"),
        ({"gather_lens": int32([3, 3])}, r"gather_lens\[0\]=3: should be at least 4"),
        ({"window": 0}, "window=0: should be at least 0 and 1"),
        ({"ratio": -1}, "ratio=-1, window=3"),
    ],
)
def test_malformed_calls_are_named(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        right.reference(two_requests(**changes))


def test_far_and_strided_rows_are_what_they_say_and_indices_fit_into_32_bits() -> None:
    for case in SWEEP:
        inputs = ask.build(case)
        if case.reach == "far":
            assert memory.is_vast(inputs.topk) and memory.is_vast(inputs.combined)
        assert inputs.request_rows * case.requests < 2**31
        assert case.layout != "strided" or inputs.topk.shape[0] < 2 or inputs.topk.stride(0) > inputs.topk.shape[1]


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    reasons = VLLM.unsupported(CombineCase(window=5), "interpreter")
    assert "is not a vLLM tree" in reasons[0]
    assert reasons[-1].startswith("window=5: the kernel gives each window token a lane")
    assert len(VLLM_V4_ROCM.unsupported(CombineCase(window=5), "interpreter")) == 1
    assert "is not a vLLM tree" in VLLM_TORCH.unsupported(CombineCase(), "cuda")[0]


@pytest.mark.parametrize("own", [True, False])
def test_the_torch_form_is_looked_for_where_the_backend_defines_it(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "vllm" / "models" / "deepseek_v41" / "amd" / "rocm.py"
    for folder in (module.parent, tmp_path / "vllm" / "triton_utils"):
        folder.mkdir(parents=True)
    for parent in ("", "models", "models/deepseek_v41", "models/deepseek_v41/amd"):
        (tmp_path / "vllm" / parent / "__init__.py").write_text("")
    text = "def combine_topk_swa_indices(*call):\n    return call[0], call[2]\n"
    module.write_text(text if own else "from vllm.elsewhere import combine_topk_swa_indices\n")
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    reasons = VLLM_TORCH.unsupported(CombineCase(), "interpreter")
    if own:
        assert reasons == []
        inputs = two_requests()
        assert VLLM_TORCH.run(inputs).combined is inputs.topk
    else:
        assert len(reasons) == 1 and "has no form of its own" in reasons[0]


@pytest.mark.vllm
def test_vllm_v41_agrees_where_the_index_tensor_has_all_columns() -> None:
    near = [case for case in SWEEP[::3] if case.buffer != "narrower" and case.reach == "near"]
    asked = [case for case in near if not VLLM.unsupported(case, "interpreter")]
    assert len(asked) > 5
    for case in asked:
        inputs = ask.build(case)
        assert passes(inputs, VLLM.run(memory.on_device(inputs, "cpu"))), case.id


def power_of_two_window(**changes: object) -> Inputs:
    """The hand-worked call with a window of four and all tokens gathered."""
    return two_requests(**{"window": 4, "gather_lens": int32([5, 3]), **changes})


@pytest.mark.vllm
def test_vllm_v41_stays_inside_what_was_gathered_where_the_contract_is_broken() -> None:
    # Two gathered tokens are too few for position 3, whose window begins at token 0; the kernel begins it at token 3.
    outputs = VLLM.run(power_of_two_window(gather_lens=int32([2, 3])))
    assert outputs.combined[0, :5].tolist() == [1, -1, 4, -1, -1]


@pytest.mark.vllm
def test_vllm_v4_moves_entries_that_are_none() -> None:
    inputs = power_of_two_window(topk=int32([[1, -1], [0, 4], [7, 7], [-1, 3], [4, 2]]))
    outputs = VLLM_V4.run(memory.on_device(inputs, "cpu"))
    # -1 becomes the row before the request's own, and 4, no entry of four, its first window row.
    assert outputs.combined[:, 0].tolist() == [1, 0, 24, 19, 24]
    assert not passes(inputs, outputs)
    assert passes(inputs, VLLM.run(memory.on_device(inputs, "cpu")))


@pytest.mark.vllm
@pytest.mark.parametrize("impl", [VLLM_V4, VLLM_V4_ROCM], ids=lambda impl: impl.name)
def test_vllm_v4_gives_negative_lengths_before_the_first_token(impl: Impl) -> None:
    lens = impl.run(power_of_two_window(seq_lens=int32([5, 0]), gather_lens=int32([5, 3]))).lens
    assert int(lens[2]) < 0


@pytest.mark.vllm
def test_vllm_v4_rocm_raises_without_rows() -> None:
    inputs = ask.build(CombineCase(requests=0))
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        VLLM_V4_ROCM.run(inputs)
    assert passes(inputs, VLLM.run(memory.on_device(inputs, "cpu")))
