"""Do rows of a verify block find their rank's cache in pages of the kernel's size?"""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from cases.case import parse
from cases.dcp import verify_pages as ask
from cases.dcp.verify_lengths import Inputs as LengthInputs
from cases.dcp.verify_pages import Inputs, PagesCase
from impl.dcp import vllm_modules
from impl.dcp.verify_pages import IMPLS
from impl.sources import settings
from oracle.dcp import verify_lengths
from oracle.dcp import verify_pages as right

OURS, VLLM, TORCH = IMPLS
RUNS = [
    pytest.param(right.reference, id="reference"),
    *(pytest.param(impl.run, id=impl.name) for impl in (OURS, TORCH)),
]


def call(blocks: list[list[int]], queries: int, block_size: int, pages: int, **changes: Any) -> Inputs:
    """A call in which every page is used."""
    requests = len(blocks)
    inputs = Inputs(
        blocks=torch.tensor(blocks, dtype=torch.int32).view(requests, -1 if blocks else 2),
        lengths=torch.full((requests,), pages * block_size, dtype=torch.int32), queries=queries, block_size=block_size,
        page_size=0, out=torch.full((requests * queries, pages), 77, dtype=torch.int32),
    )  # fmt: skip
    return dataclasses.replace(inputs, **changes)


@pytest.mark.parametrize("run", RUNS)
def test_blocks_of_two_tiles(run: Any) -> None:
    answer = run(call([[7, 9]], 4, 256, 3))
    assert answer.page_size.tolist() == [128]
    assert answer.pages.tolist() == [[14, 15, 18]] * 4


@pytest.mark.parametrize("run", RUNS)
def test_a_block_of_twelve_tiles(run: Any) -> None:
    answer = run(call([[3, 0], [1, 5]], 2, 1536, 24))
    assert answer.page_size.tolist() == [128]
    first, second = [*range(36, 48), *range(12)], [*range(12, 24), *range(60, 72)]
    assert answer.pages.tolist() == [first, first, second, second]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("block", "size"), [(1, 1), (16, 16), (48, 16), (64, 64), (96, 32), (128, 128), (256, 128), (1536, 128), (3, 1)]
)
def test_a_tile_is_a_power_of_two_that_divides_the_block(run: Any, block: int, size: int) -> None:
    assert run(call([[5]], 1, block, 1)).page_size.tolist() == [size]


@pytest.mark.parametrize("run", RUNS)
def test_a_page_that_is_a_block_keeps_its_number(run: Any) -> None:
    answer = run(call([[7, 9, 2]], 2, 256, 3, page_size=256))
    assert (answer.page_size.tolist(), answer.pages.tolist()) == ([256], [[7, 9, 2]] * 2)
    assert run(call([[7, 9]], 1, 96, 5, page_size=16)).pages.tolist() == [[42, 43, 44, 45, 46]]


@pytest.mark.parametrize("run", RUNS)
def test_no_request_has_no_row(run: Any) -> None:
    assert run(call([], 4, 128, 2)).pages.shape == (0, 2)


@pytest.mark.parametrize("run", RUNS)
def test_pages_behind_the_last_token_do_not_matter(run: Any) -> None:
    short = {
        "lengths": torch.tensor([129], dtype=torch.int32),
        "blocks": torch.tensor([[7, -(1 << 31)]], dtype=torch.int32),
    }
    inputs = dataclasses.replace(call([[7, 9]], 1, 256, 4), **short)
    answer = run(inputs)
    assert answer.pages[0, :2].tolist() == [14, 15]
    assert all(check.passed for check in right.judge(inputs, answer, right.HONEST[0].declared(inputs)))


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    st.integers(0, 10_000), st.sampled_from(ask.AXES["block_size"]), st.sampled_from(["tile", "half", "block"])
)
def test_every_token_is_found_in_its_block(seed: int, block_size: int, page: str) -> None:
    case = PagesCase(seed=seed, block_size=block_size, page=page, pages=5)  # type: ignore[arg-type]
    hypothesis.assume(not ask.forbid(case))
    inputs = ask.build(case)
    answer = right.reference(inputs)
    size = int(answer.page_size)
    assert size & (size - 1) == 0 or page == "block"
    for request, length in enumerate(inputs.lengths.tolist()):
        for row in range(request * inputs.queries, (request + 1) * inputs.queries):
            for token in range(length):
                slot = int(inputs.blocks[request, token // block_size]) * block_size + token % block_size
                assert int(answer.pages[row, token // size]) * size + token % size == slot


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size=0: should be 1 or more"),
        ({"queries": 0}, "queries=0: should be 1 or more"),
        ({"page_size": 96}, "page_size=96: should divide block_size=256"),
        ({"page_size": -128}, "page_size=-128: should divide"),
        ({"queries": 3}, "out has 4 rows: should be 3"),
        ({"blocks": torch.zeros((0, 2), dtype=torch.int32)}, "blocks has 0 rows: should be 1 or more"),
        ({"blocks": torch.zeros((1, 1), dtype=torch.int32)}, "blocks has 1 columns: should be 2 or more for 3 pages"),
        (
            {"blocks": torch.tensor([[1 << 30, 2]], dtype=torch.int32)},
            "block=1073741824: its pages should fit into int32",
        ),
        ({"blocks": torch.tensor([[-1, 2]], dtype=torch.int32)}, "its pages should fit into int32"),
    ],
)
def test_calls_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        right.reference(dataclasses.replace(call([[7, 9]], 4, 256, 3), **changes))


def test_ours_reads_a_table_whose_rows_lie_far_apart() -> None:
    (case,) = (case for case in map(parse, ask.REGRESSIONS) if case.settings["layout"] == "far")
    inputs = ask.build(case)  # type: ignore[arg-type]
    assert inputs.blocks.stride(0) * inputs.blocks.shape[0] * 4 > 1 << 31
    assert torch.equal(OURS.run(inputs).pages, right.reference(inputs).pages)


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path / "nowhere")
    assert "does not exist" in VLLM.unsupported(PagesCase(), "interpreter")[0]


@pytest.mark.vllm
@pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")
class TestRealVllm:
    """Facts about vLLM's own code."""

    @pytest.fixture(autouse=True)
    def _real_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(settings, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))

    def test_it_refuses_what_the_reference_refuses(self) -> None:
        for changes in (
            {"page_size": 96},
            {"blocks": torch.zeros((1, 1), dtype=torch.int32)},
            {"block_size": 0},
        ):
            with pytest.raises((AssertionError, ZeroDivisionError)):
                VLLM.run(dataclasses.replace(call([[7, 9]], 4, 256, 3), **changes))

    @pytest.mark.parametrize("graphs", [False, True])
    def test_its_row_view_is_made_of_rows_lengths_and_single_queries(self, graphs: bool) -> None:
        """The builder's whole view: with graphs, rows behind the batch keep what they held and the bound is fixed."""
        loader = vllm_modules.loader_for(torch.zeros(1))
        builder = loader.symbol(vllm_modules.BACKEND, vllm_modules.BUILDER)
        whole = torch.tensor([1000, 0, 777], dtype=torch.int32)
        held = SimpleNamespace(
            row_lens=torch.full((20,), 55, dtype=torch.int32), qo_indptr=torch.arange(21, dtype=torch.int32),
            block_table=torch.full((20, 5), 66, dtype=torch.int32), page_size=128, max_kv_seq_len=600,
        )  # fmt: skip
        this = SimpleNamespace(
            dcp_world_size=2, dcp_rank=1, cp_kv_cache_interleave_size=1, kernel_block_size=256,
            _dcp_verify_page_size=128, _dcp_verify_buffers=held if graphs else None,
        )  # fmt: skip
        this._fill_dcp_verify_page_table = builder._fill_dcp_verify_page_table.__get__(this)
        blocks = torch.tensor([[7, 9, 1], [0, 0, 0], [4, 3, 2]], dtype=torch.int32)
        view = builder._build_dcp_verify_row_view(this, 4, blocks, whole)
        lengths = verify_lengths.reference(LengthInputs(whole, 4, 2, 1, 1)).lengths
        assert torch.equal(view.row_lens, lengths)
        assert view.qo_indptr.tolist() == list(range(13))
        # The longest row sees 500 tokens: four pages. A fixed bound of 600 needs five.
        assert (view.max_kv_seq_len, view.block_table.shape[1]) == ((600, 5) if graphs else (500, 4))
        want = right.reference(call(blocks.tolist(), 4, 256, view.block_table.shape[1])).pages
        assert torch.equal(view.block_table, want)
        if graphs:
            assert held.row_lens[12:].tolist() == [55] * 8 and bool((held.block_table[12:] == 66).all())
