"""Is every kind of memory fault caught, in the right program and lane, and is sound code left alone?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl

from impl.executions.memory_watch import MemoryViolation, watch


@triton.jit
def copy_kernel(source, out, n, N: tl.constexpr):
    lanes = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + lanes, tl.load(source + lanes, mask=lanes < n, other=0), mask=lanes < n)


@triton.jit
def rows_kernel(source, out, stride, ROWS: tl.constexpr, N: tl.constexpr):
    rows, lanes = tl.arange(0, ROWS), tl.arange(0, N)
    x = tl.load(source + rows[:, None] * stride + lanes[None, :])
    tl.store(out + rows, tl.sum(x.to(tl.float32), axis=1))


@triton.jit
def shifted_store_kernel(out, first, N: tl.constexpr):
    lanes = first + tl.arange(0, N)
    tl.store(out + lanes, lanes.to(tl.float32))


@triton.jit
def overlapping_kernel(out, step, N: tl.constexpr):
    lanes = tl.program_id(1) * step + tl.arange(0, N)
    tl.store(out + lanes, tl.program_id(1))


@triton.jit
def narrow_after_wide_kernel(wide, narrow):
    if tl.program_id(0) == 0:
        tl.store(wide + 1, 7)
    else:
        tl.store(narrow + 6, 1)


@triton.jit
def atomic_kernel(out, at):
    tl.atomic_add(out + at, 1)


@triton.jit
def unnamed_other_kernel(source, out, n, N: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(out + lanes, tl.load(source + lanes, mask=lanes < n))


@triton.jit
def zero_other_kernel(source, out, n):
    tl.store(out, tl.load(source, mask=n > 0, other=0.0))


@triton.jit
def last_kernel(source, out, n):
    tl.store(out, tl.load(source + n - 1))


@pytest.fixture
def watched() -> Iterator[None]:
    with watch():
        yield


@pytest.mark.usefixtures("watched")
def test_sound_kernels_pass() -> None:
    source, out = torch.arange(20, dtype=torch.float32), torch.zeros(20)
    copy_kernel[(3,)](source, out, 20, 8)
    assert out.tolist() == source.tolist()


@pytest.mark.usefixtures("watched")
def test_a_load_past_the_end_names_its_program_lane_and_distance() -> None:
    source, out = torch.arange(20, dtype=torch.float32), torch.zeros(32)
    with pytest.raises(MemoryViolation) as caught:
        copy_kernel[(3,)](source, out, 22, 8)
    assert str(caught.value) == (
        "out-of-bounds load in copy_kernel, program (2, 0, 0), lane (4,): 4 bytes past the end of argument source"
    )
    assert caught.value.kind == "out-of-bounds load"
    assert caught.value.program == (2, 0, 0)
    assert caught.value.lane == (4,)
    assert caught.value.argument == "source"
    assert caught.value.offset == 80
    assert caught.value.address == source.data_ptr() + 80


@pytest.mark.usefixtures("watched")
def test_a_lane_of_a_matrix_is_named_by_row_and_column() -> None:
    source, out = torch.zeros(4 * 16, dtype=torch.bfloat16), torch.zeros(4)
    with pytest.raises(MemoryViolation, match=r"lane \(3, 13\): 2 bytes past the end of argument source"):
        rows_kernel[(1,)](source, out, 17, 4, 16)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize(
    ("first", "lane", "where"), [(-2, 0, "8 bytes before the start"), (6, 2, "4 bytes past the end")]
)
def test_a_store_outside_is_caught_before_it_happens(first: int, lane: int, where: str) -> None:
    out = torch.zeros(8)
    with pytest.raises(MemoryViolation, match=rf"out-of-bounds store .* lane \({lane},\): {where} of argument out"):
        shifted_store_kernel[(1,)](out, first, 4)
    assert not out.any()


@pytest.mark.usefixtures("watched")
def test_a_load_in_front_of_an_empty_tensor_is_caught_before_it_happens() -> None:
    # Its address is that of no memory at all, and four bytes before it is a negative number.
    with pytest.raises(
        MemoryViolation, match="load in last_kernel, .* address -4 is near null, where an argument without"
    ):
        last_kernel[1,](torch.empty(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 0)


@pytest.mark.usefixtures("watched")
def test_an_atomic_outside_is_caught() -> None:
    out = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(MemoryViolation, match="out-of-bounds atomic"):
        atomic_kernel[(1,)](out, 2)


@pytest.mark.usefixtures("watched")
def test_two_programs_writing_one_byte_is_a_race() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(MemoryViolation) as caught:
        overlapping_kernel[(1, 3)](out, 7, 8)
    assert str(caught.value) == (
        "write race in overlapping_kernel, program (0, 1, 0), lane (0,): "
        "byte 28 of argument out was already written by program (0, 0, 0)"
    )


@pytest.mark.usefixtures("watched")
def test_programs_writing_side_by_side_do_not_race_and_launches_are_apart() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    for _ in range(2):
        overlapping_kernel[(1, 3)](out, 8, 8)
    assert out[:24].tolist() == [0] * 8 + [1] * 8 + [2] * 8


@pytest.mark.usefixtures("watched")
def test_a_race_between_element_sizes_is_seen_byte_by_byte() -> None:
    wide = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(MemoryViolation, match=r"program \(1, 0, 0\).* byte 6 of argument wide .* program \(0, 0, 0\)"):
        narrow_after_wide_kernel[(2,)](wide, wide.view(torch.int8))


@pytest.mark.usefixtures("watched")
def test_programs_may_share_a_byte_atomically() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    atomic_kernel[(5,)](out, 0)
    assert out.item() == 5


def test_races_can_be_allowed() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    with watch(races=False):
        overlapping_kernel[(1, 3)](out, 7, 8)
    assert out[:22].tolist() == [0] * 7 + [1] * 7 + [2] * 8


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
                                   torch.float8_e4m3fnuz, torch.float8_e5m2])  # fmt: skip
def test_masked_lanes_without_other_are_nan(dtype: torch.dtype) -> None:
    out = torch.zeros(8).to(dtype)
    unnamed_other_kernel[(1,)](torch.ones(8).to(dtype), out, 5, 8)
    assert out[:5].float().tolist() == [1.0] * 5
    assert out[5:].float().isnan().all()


@pytest.mark.usefixtures("watched")
def test_masked_integer_lanes_without_other_are_garbage() -> None:
    out = torch.zeros(8, dtype=torch.int32)
    unnamed_other_kernel[(1,)](torch.ones(8, dtype=torch.int32), out, 5, 8)
    assert out[5:].tolist() == [-1515870811] * 3


@pytest.mark.usefixtures("watched")
def test_a_scalar_other_of_zero_is_not_taken_for_none() -> None:
    out = torch.ones(1)
    zero_other_kernel[(1,)](torch.ones(1), out, 0)
    assert out.item() == 0.0


def test_nothing_is_watched_outside_the_context() -> None:
    out = torch.ones(8)
    unnamed_other_kernel[(1,)](torch.ones(8), out, 5, 8)
    assert out.tolist() == [1.0] * 5 + [0.0] * 3
