"""Is every byte that a kernel may not touch poisoned before it runs, and looked at afterwards?"""

import dataclasses
from typing import Any

import pytest
import torch

from cases import OPS, op_module
from cases.case import case_type
from cases.memory import (
    GUARD_BYTES,
    INTEGER_POISON,
    as_view,
    element_bytes,
    far_gap,
    guarded,
    guarded_copy,
    is_vast,
    map_tensors,
    moved,
    named_tensors,
    on_device,
    owned_bytes,
    poison_byte,
    storage_bytes,
    trespasses,
)

FLOATS = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz,
    torch.float8_e5m2, torch.float8_e8m0fnu,
)  # fmt: skip
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True)
class Part:
    rows: torch.Tensor
    extra: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Call:
    part: Part
    out: torch.Tensor
    pair: tuple[torch.Tensor, torch.Tensor]
    scale: float = 2.0


def call() -> Call:
    return Call(
        part=Part(rows=guarded_copy(torch.arange(12.0).reshape(3, 4), gaps=(2,))),
        out=guarded((3, 4), torch.bfloat16, gaps=(8,)),
        pair=(guarded_copy(torch.arange(5)), torch.tensor([1, 2, 3])),
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_unwritten_floats_are_nan(dtype: torch.dtype) -> None:
    assert guarded((2, 3), dtype).to(torch.float32).isnan().all()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_unwritten_integers_are_no_index_and_no_length(dtype: torch.dtype) -> None:
    values = guarded((2, 3), dtype)
    assert storage_bytes(values).eq(INTEGER_POISON).all()
    assert int(values.min()) > 100


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0), (2, 3, 4), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
def test_guards_stand_before_and_after_the_elements(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = guarded(shape, dtype)
    owned = owned_bytes(tensor)
    assert tensor.shape == shape
    assert int(owned.sum()) == tensor.numel() * tensor.element_size()
    spots = owned.nonzero().flatten()
    if len(spots):
        assert int(spots[0]) == GUARD_BYTES
        assert len(owned) - 1 - int(spots[-1]) >= GUARD_BYTES
    else:
        assert len(owned) >= 2 * GUARD_BYTES


def test_gaps_lie_after_each_run_of_their_dimension() -> None:
    tensor = guarded((2, 3, 4), torch.float32, gaps=(8, 2))
    assert tensor.stride() == (3 * (4 + 2) + 8, 4 + 2, 1)
    assert int(owned_bytes(tensor).sum()) == 2 * 3 * 4 * 4
    assert guarded((2, 3, 4), torch.float32, gaps=(8,)).stride() == (3 * 4 + 8, 4, 1)
    assert guarded((2, 3), torch.float32).is_contiguous()


@pytest.mark.parametrize("lead", [256, 258, 2, 130])
def test_a_tensor_begins_where_it_was_asked_to(lead: int) -> None:
    tensor = guarded((4,), torch.bfloat16, lead=lead)
    assert tensor.storage_offset() * 2 == lead
    assert int(owned_bytes(tensor).nonzero()[0]) == lead


def test_a_guarded_copy_has_the_values_and_nothing_else_changed() -> None:
    values = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    copy = guarded_copy(values, gaps=(1,))
    assert copy.equal(values)
    assert storage_bytes(copy)[~owned_bytes(copy)].eq(INTEGER_POISON).all()
    values[0, 0] = 9
    assert int(copy[0, 0]) == 0


@pytest.mark.parametrize("stride", [(1, 2), (0, 1), (4, 1)])
def test_a_moved_tensor_is_the_same_view_of_other_memory(stride: tuple[int, int]) -> None:
    base = torch.arange(40, dtype=torch.int16)
    view = base.as_strided((2, 3), stride, 5)
    copy = moved(view, "cpu")
    assert copy.equal(view)
    assert (copy.stride(), copy.storage_offset()) == (view.stride(), view.storage_offset())
    assert storage_bytes(copy).equal(storage_bytes(view))
    base.zero_()
    assert int(copy.sum()) != 0


def test_tensors_are_named_by_their_paths_in_order() -> None:
    assert [name for name, _ in named_tensors(call())] == ["part.rows", "out", "pair[0]", "pair[1]"]
    assert [name for name, _ in named_tensors(torch.zeros(1))] == [""]
    assert not list(named_tensors(None))


def test_mapping_keeps_structure_values_and_sharing() -> None:
    shared = torch.zeros(2)
    before = Call(part=Part(shared, extra=shared), out=torch.zeros(1), pair=(shared, torch.ones(1)), scale=7.0)
    after = map_tensors(before, lambda tensor: tensor + 1)
    assert after.part.rows is after.part.extra is after.pair[0]
    assert after.scale == 7.0
    assert float(before.part.rows.sum()) == 0


def test_a_private_copy_shares_no_byte() -> None:
    before = call()
    after = on_device(before, "cpu")
    for _, tensor in named_tensors(after):
        storage_bytes(tensor).zero_()
    assert not trespasses(before, call(), ())
    assert len(trespasses(before, after, ("out",))) == 4


def test_writing_the_elements_of_an_output_is_no_trespass() -> None:
    before = call()
    after = on_device(before, "cpu")
    after.out.fill_(1.0)
    assert not trespasses(before, after, ("out",))
    assert len(trespasses(before, after, ())) == 1


def _byte(tensor: torch.Tensor, position: int) -> Any:
    return storage_bytes(tensor)[tensor.storage_offset() * tensor.element_size() + position]


@pytest.mark.parametrize(
    ("position", "spot"),
    [(-1, -1), (-GUARD_BYTES, -GUARD_BYTES), (8, 8), (23, 23), (3 * 24 - 16, 3 * 24 - 16), (3 * 24 + 5, 3 * 24 + 5)],
)
def test_one_byte_outside_an_output_is_a_trespass_with_its_place(position: int, spot: int) -> None:
    before = call()
    after = on_device(before, "cpu")
    _byte(after.out, position).add_(1)
    (sentence,) = trespasses(before, after, ("out",))
    assert (
        sentence == f"out: 1 bytes were written outside its elements, the first at byte {spot} from its first element"
    )


@pytest.mark.parametrize("path", ["part.rows", "pair[0]", "pair[1]"])
def test_one_changed_byte_of_an_input_is_a_trespass(path: str) -> None:
    before = call()
    after = on_device(before, "cpu")
    _byte(dict(named_tensors(after))[path], 0).add_(1)
    (sentence,) = trespasses(before, after, ("out",))
    assert sentence.startswith(f"{path}: 1 bytes were written though it is an input")


def test_writing_back_what_was_there_leaves_no_trace() -> None:
    """A limit that is known: only bytes that differ can be seen afterwards."""
    before = call()
    after = on_device(before, "cpu")
    _byte(after.out, -1).add_(0)
    assert not trespasses(before, after, ("out",))


def test_every_float_dtype_of_torch_that_ops_use_is_poisoned_by_nan() -> None:
    for op in OPS:
        for name, tensor in named_tensors(op_module("cases", op).build(case_type(op)())):
            if tensor.dtype.is_floating_point:
                byte = torch.full((tensor.element_size(),), poison_byte(tensor.dtype), dtype=torch.uint8)
                assert byte.view(tensor.dtype).to(torch.float32).isnan().all(), (op, name)


def vast(rows: int = 3, width: int = 64) -> torch.Tensor:
    view = guarded((rows, width), torch.bfloat16, gaps=(far_gap(rows, width),))
    view.copy_(torch.arange(rows * width).reshape(rows, width))
    return view


def test_the_last_of_far_rows_starts_beyond_32_bits_and_the_pitch_does_not() -> None:
    view = vast()
    assert view.stride(0) < 2**31 <= 2 * view.stride(0)
    assert is_vast(view)


def test_two_rows_cannot_be_far_apart() -> None:
    with pytest.raises(ValueError, match="should be 3 or more"):
        far_gap(2, 64)


def test_a_vast_tensor_moves_with_its_rows_and_the_guards_next_to_them() -> None:
    view = vast()
    copy = moved(view, "cpu")
    assert copy.data_ptr() != view.data_ptr()
    assert torch.equal(copy, view)
    assert copy.stride() == view.stride()
    behind = as_view(storage_bytes(copy), torch.bfloat16, (3, 8), copy.stride(), 256 + 128)
    assert behind.isnan().all()


@pytest.mark.parametrize("byte", [-1, 128, 128 + 255])
def test_a_byte_next_to_a_far_row_is_guarded(byte: int) -> None:
    before = Part(rows=vast())
    after = on_device(before, "cpu")
    storage = storage_bytes(after.rows)
    storage[256 + 2 * after.rows.stride(0) * 2 + byte] = 1
    (sentence,) = trespasses(before, after, writable=("rows",))
    assert f"the first at byte {2 * after.rows.stride(0) * 2 + byte} " in sentence


def test_the_elements_of_far_rows_may_change_where_they_are_written_to_only() -> None:
    before = Part(rows=vast())
    after = on_device(before, "cpu")
    after.rows[2, 5] = 7.0
    assert trespasses(before, after, writable=("rows",)) == []
    assert len(trespasses(before, after, writable=())) == 1


def test_the_bytes_of_one_element_are_read_whatever_its_strides() -> None:
    odd = torch.arange(6, dtype=torch.int16)[::2].as_strided((1, 1), (0, 5))
    assert element_bytes(odd).tolist() == [0, 0]
    assert element_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16).T).tolist() == [1, 0, 3, 0, 2, 0, 4, 0]
