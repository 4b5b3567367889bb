"""What does a row become that is rotated before it is written as a packed record?

    (a, b) = lanes 448 + 2k, 449 + 2k of the row,   (c, s) = entries k, 32 + k of the position's row of the table
    a' = bf16(a * c - b * s),   b' = bf16(b * c + a * s)      k = 0..31, products and sum in float32

Lanes 0..447 become codes and scales as `oracle.cache.records` has it. Whether a product is fused with the sum is the
implementation's affair: a rotated lane may hold what any number within the bound of `oracle.rotation` rounds to.
Everything else is exact.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.cache import kv_record_write
from cases.precision import Precision
from oracle import rotation
from oracle.cache import kv_record_write as plain_writer
from oracle.cache import records
from oracle.cache.records import NOPE_LANES, ROPE_LANES
from oracle.check import Check, bounded, exact
from oracle.formats import numbers
from oracle.formats.numbers import Encoding


@dataclasses.dataclass(frozen=True)
class Write:
    """A call put plainly: row t of `rows`, turned by row `at[t]` of `cos_sin`, goes to slot `slots[t]`.

    Tokens with a negative slot write nothing, and their `at` means nothing. Rows beyond the slots are padding.
    `zero_nans`: NaN that the rotation gives is stored as 0.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    at: torch.Tensor
    cos_sin: torch.Tensor
    cache: torch.Tensor
    encoding: Encoding
    zero_nans: bool = False

    def taken(self) -> torch.Tensor:
        """The tokens that write, int64."""
        return (self.slots >= 0).nonzero().flatten()


Turn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check_form(rows: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, slots: torch.Tensor) -> None:
    """Raises `ValueError` for rows of another form or with gaps, too few rows or positions, and another form of table.

    The cache's form is `oracle.cache.records.write`'s to refuse.
    """
    if rows.dtype != torch.bfloat16 or rows.dim() != 2 or rows.shape[1] != records.LATENT_LANES:
        raise ValueError(f"rows={rows.dtype}{list(rows.shape)}: should be torch.bfloat16[rows, 512]")
    if not rows.is_contiguous():
        raise ValueError(f"rows have strides {rows.stride()}: should be contiguous")
    if slots.numel() > min(rows.shape[0], positions.numel()):
        raise ValueError(
            f"{slots.numel()} slots for {rows.shape[0]} rows and {positions.numel()} positions: should be no more than either"
        )
    if cos_sin.dtype != torch.float32 or cos_sin.dim() != 2 or cos_sin.shape[1] != ROPE_LANES or cos_sin.stride(1) != 1:
        raise ValueError(
            f"cos_sin={cos_sin.dtype}{list(cos_sin.shape)}: should be torch.float32[positions, 64] with lane stride 1"
        )


def checked(write: Write) -> Write:
    """The same call; raises `IndexError` for a writing token's position outside the table, `ValueError` for a slot that
    two tokens write. Slots beyond the cache are `oracle.cache.records.write`'s to refuse."""
    taken = write.taken()
    at, table = write.at[taken], write.cos_sin.shape[0]
    beyond = at[(at < 0) | (at >= table)]
    if beyond.numel():
        raise IndexError(f"position {int(beyond[0])}: should be 0 to {table - 1}, the rows of cos_sin")
    ordered = write.slots[taken].sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.numel():
        raise ValueError(f"slot {int(twice[0])} is written twice: should be written by one token")
    return write


def rotated(lanes: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """The 64 rotated lanes [n, 64] of `lanes` [n, 64] by `cos_sin` [n, 64], both of one dtype, and so is the result."""
    return rotation.turn(lanes[:, None], cos_sin, lanes.dtype, inverse=False)[:, 0]


def stored(write: Write, turn: Turn = rotated, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The 64 lanes, bfloat16 [n, 64], that the n writing tokens store, rotated by `turn` in `dtype`."""
    taken = write.taken()
    value = turn(write.rows[taken, NOPE_LANES:].to(dtype), write.cos_sin[write.at[taken]].to(dtype))
    if write.zero_nans:
        value = value.masked_fill(torch.isnan(value), 0.0)
    return numbers.round_to_bfloat16(value)


def unrotated(write: Write, turn: Turn = rotated, dtype: torch.dtype = torch.float32) -> kv_record_write.Inputs:
    """The call of a writer without rotation that comes to the same: its rows are rotated already."""
    rows = write.rows[: write.slots.numel()].clone()
    rows[write.taken(), NOPE_LANES:] = stored(write, turn, dtype)
    return kv_record_write.Inputs(rows, write.slots, write.cache, write.encoding)


def written(write: Write, turn: Turn = rotated, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The cache as it must be after the call, a copy."""
    return plain_writer.reference(unrotated(write, turn, dtype)).cache


def judge(write: Write, got: torch.Tensor | None, precision: Precision) -> tuple[Check, ...]:
    """The cache `got`: codes, scales and unwritten lanes bit for bit, [block, place, byte]; rotated lanes as `rope`,
    [number of the writing token, lane], within the bound."""
    want = written(write)
    if got is None or got.shape != want.shape or got.dtype != want.dtype:
        return (exact("cache", got, want),)
    block_size = write.cache.shape[1]
    taken = write.taken()
    slots = write.slots[taken]
    at = (slots // block_size, slots % block_size)
    left = torch.ones((*want.shape[:2], 1), dtype=torch.bool, device=want.device)
    left[at] = False
    found, right = records.record_views(got), records.record_views(want)
    lanes, angles = write.rows[taken, NOPE_LANES:].double(), write.cos_sin[write.at[taken]].double()
    truth = rotated(lanes, angles)
    if write.zero_nans:
        truth = truth.masked_fill(torch.isnan(truth), 0.0)
    allowed = rotation.bound(lanes[:, None], angles, precision, inverse=False)[:, 0]
    # What rounds to infinity even at the near end of its bound is infinite.
    lost = torch.isinf(numbers.round_to_bfloat16(truth.abs() - allowed))
    truth = torch.where(lost, truth.sign() * float("inf"), truth)
    return (
        exact(
            "codes", found.codes, right.codes,
            why="each lane rounds to one code under its group's scale, and other records stay as they were",
        ),
        exact(
            "scales", found.scales, right.scales,
            why="the scale is the smallest that fits the group, byte 7 is 0, and other records stay as they were",
        ),
        exact("rope elsewhere", found.rope, right.rope, mask=left, why="records that no token writes stay as they were"),
        bounded(
            "rope", found.rope[at].contiguous().view(torch.bfloat16), truth, allowed,
            dtype=torch.bfloat16, rounding=torch.bfloat16, why="no float32 rotation of the pair rounds to this",
        ),
    )  # fmt: skip
