"""Which rows of a rank's log-sum-exps must say that the rank has nothing to add?

    row i is empty    if i >= query_start[B], or lengths[r] == 0 for the request r whose rows it is among
    lse[i, :] = -inf  where it is empty; every other row keeps its bits

r is the number of bounds query_start[1..B] that are at most i. Rows behind the last request's are padding and always
empty; without a request all rows are. Where neither lengths nor bounds are given, nothing is masked. Lengths are those on
this rank: by the length of the whole sequence no rank would be empty. The mask knows requests only; a row that sees none
of its request's tokens must come with -inf. Source: `mask_dcp_empty_shards_` of vLLM, which the packing for an all-to-all
repeats in its kernel.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.dcp.mask_empty_shards import Inputs, Outputs
from cases.memory import guarded, guarded_copy, moved
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant

_NOTHING = -float("inf")


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """The masked log-sum-exps, a tensor of their own; `dtype` changes nothing, since bits are kept.

    Raises ValueError where only one of lengths and bounds is given, where they are no vectors of B and B + 1 entries,
    and where bounds fall, do not begin with 0, or pass the rows.
    """
    del dtype
    return _masked(inputs, empty_rows(inputs))


def empty_rows(inputs: Inputs) -> torch.Tensor:
    """Which rows are empty, bool [rows]; raises as `reference` does."""
    lengths, bounds = inputs.lengths, inputs.query_start
    rows = torch.arange(inputs.lse.shape[0], device=inputs.lse.device)
    if lengths is None and bounds is None:
        return rows < 0
    if lengths is None or bounds is None:
        missing = "lengths" if lengths is None else "query_start"
        raise ValueError(f"{missing}=None: should be given where the other one of lengths and query_start is")
    if lengths.ndim != 1 or bounds.ndim != 1 or bounds.numel() != lengths.numel() + 1:
        raise ValueError(
            f"query_start={list(bounds.shape)}: should have one entry more than lengths={list(lengths.shape)}"
        )
    if int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()) or int(bounds[-1]) > rows.numel():
        raise ValueError(f"query_start={bounds.tolist()}: should rise from 0 to at most {rows.numel()} rows")
    counts = bounds.long().diff()
    empty = torch.ones_like(rows, dtype=torch.bool)
    empty[: int(bounds[-1])] = (lengths == 0).repeat_interleave(counts)
    return empty


def _masked(inputs: Inputs, empty: torch.Tensor, nothing: float = _NOTHING) -> Outputs:
    """A dense copy with `nothing` in the empty rows; as bits, so that a NaN that is kept stays what it was."""
    bits = inputs.lse.clone(memory_format=torch.contiguous_format).view(torch.int32)
    code = torch.tensor([nothing], dtype=torch.float32, device=bits.device).view(torch.int32)
    return Outputs(torch.where(empty[:, None], code, bits).view(torch.float32))


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Every log-sum-exp, bit for bit."""
    del precision
    want, empty = reference(inputs).lse, empty_rows(inputs)
    check = exact("lse", outputs.lse, want)
    if check.passed or len(check.where) != 2:
        return (check,)
    row = check.where[0]
    why = "the rank has nothing to add to this row" if bool(empty[row]) else "this row is not empty and keeps its bits"
    return (exact("lse", outputs.lse, want, why=why),)


def _edited(inputs: Inputs, lse: torch.Tensor | None = None, **changes: object) -> Inputs:
    """The call with something changed, and log-sum-exps of its own."""
    if lse is None:
        own = moved(inputs.lse, inputs.lse.device)
    else:
        own = guarded(lse.shape, torch.float32, gaps=(1,))
        own.view(torch.int32).copy_(lse.contiguous().view(torch.int32))
    return dataclasses.replace(inputs, lse=own, **changes)  # type: ignore[arg-type]


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


def _again(inputs: Inputs) -> Inputs:
    return _edited(inputs, reference(inputs).lse)


def _other_lengths(inputs: Inputs) -> Inputs | None:
    lengths = inputs.lengths
    if lengths is None:
        return None
    return _edited(
        inputs, lengths=guarded_copy(torch.where(lengths > 0, (1 << 31) - lengths.long(), 0).to(torch.int64))
    )


def _more_requests(inputs: Inputs) -> Inputs | None:
    """Before and behind every request stands one without rows, alternately with tokens and without."""
    lengths, bounds = inputs.lengths, inputs.query_start
    if lengths is None or bounds is None or not lengths.numel():
        return None
    other = (torch.arange(lengths.numel()) % 2).to(lengths.dtype)
    return _edited(
        inputs, lengths=guarded_copy(torch.stack((other, lengths, 1 - other), dim=1).flatten()),
        query_start=guarded_copy(torch.cat((bounds[:-1].repeat_interleave(3), bounds[-1:]))[_shifted(lengths.numel())]),
    )  # fmt: skip


def _shifted(requests: int) -> torch.Tensor:
    """Of each bound three times over, which one each of three times as many requests begins at."""
    begin = torch.arange(requests) * 3
    following = torch.cat((begin[1:], torch.tensor([3 * requests])))
    return torch.cat((torch.stack((begin, begin, following), dim=1).flatten(), following[-1:]))


def _row_by_row(inputs: Inputs) -> Inputs | None:
    """Every row is a request of its own."""
    lengths, bounds = inputs.lengths, inputs.query_start
    if lengths is None or bounds is None:
        return None
    counts = bounds.diff()
    starts = torch.arange(int(bounds[-1]) + 1, dtype=torch.int32)
    return _edited(inputs, lengths=guarded_copy(lengths.repeat_interleave(counts)), query_start=guarded_copy(starts))


def _heads_reversed(inputs: Inputs) -> Inputs:
    return _edited(inputs, inputs.lse.flip(1))


def _in_that_order(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return Outputs(first.lse.flip(1))


def _padded(inputs: Inputs) -> Inputs | None:
    if inputs.lengths is None:
        return None
    return _edited(inputs, torch.cat((inputs.lse, torch.zeros(3, inputs.lse.shape[1]))))


def _and_nothing(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs
    more = torch.full((edited.lse.shape[0] - first.lse.shape[0], first.lse.shape[1]), _NOTHING)
    return Outputs(torch.cat((first.lse, more)))


LAWS: tuple[Law, ...] = (
    Law("E1 masked again", "what is masked stays masked", _again, _same, "bitwise"),
    Law("E2 other lengths", "only whether there is a token counts", _other_lengths, _same, "bitwise"),
    Law("E3 requests without rows", "a request without rows changes none", _more_requests, _same, "bitwise"),
    Law("E4 a request a row", "rows of a request are masked each by itself", _row_by_row, _same, "bitwise"),
    Law("E5 heads reversed", "all heads of a row are masked alike", _heads_reversed, _in_that_order, "bitwise"),
    Law("E6 more padding", "rows behind the last request's are empty", _padded, _and_nothing, "bitwise"),
)  # fmt: skip


def _rule(name: str, pitfall: str, rule: Callable[[Inputs, torch.Tensor, torch.Tensor], torch.Tensor]) -> Mutant:
    """An answer that masks other rows, found from lengths, bounds and nothing else."""

    def answer(inputs: Inputs) -> Outputs | None:
        if inputs.lengths is None or inputs.query_start is None:
            return None
        return _masked(inputs, rule(inputs, inputs.lengths, inputs.query_start.long()))

    return Mutant(name, pitfall, answer)


def _filled(name: str, pitfall: str, nothing: float) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _masked(inputs, empty_rows(inputs), nothing))


def _rows(inputs: Inputs) -> torch.Tensor:
    return torch.arange(inputs.lse.shape[0])


def _looked_up(inputs: Inputs, lengths: torch.Tensor, request: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """Rows are empty that are padding or whose request, by number, has no token."""
    if not lengths.numel():
        return torch.ones_like(padding)
    return padding | (lengths[request.clamp(0, lengths.numel() - 1)] == 0)


def _searched(
    inputs: Inputs, lengths: torch.Tensor, bounds: torch.Tensor, *, right: bool, padding: int
) -> torch.Tensor:
    rows = _rows(inputs)
    return _looked_up(inputs, lengths, torch.searchsorted(bounds[1:], rows, right=right), rows >= bounds[-1] + padding)


def _by_equal_share(inputs: Inputs, lengths: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    rows = _rows(inputs)
    queries = max(1, rows.numel() // max(1, lengths.numel()))
    return _looked_up(inputs, lengths, rows // queries, rows >= bounds[-1])


def _first_head_only(inputs: Inputs) -> Outputs:
    right = reference(inputs)
    kept = _masked(inputs, _rows(inputs) < 0).lse
    kept[:, :1] = right.lse[:, :1]
    return Outputs(kept)


def _sanitised(inputs: Inputs) -> Outputs:
    lse = reference(inputs).lse
    return Outputs(torch.where(torch.isnan(lse) | (lse == float("inf")), _NOTHING, lse))


def _last_row_only(inputs: Inputs, lengths: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    rows = _rows(inputs)
    return empty_rows(inputs) & ((rows >= bounds[-1]) | torch.isin(rows + 1, bounds[1:]))


MUTANTS: tuple[Mutant, ...] = (
    _rule("nothing-masked", "no row were ever masked", lambda inputs, lengths, bounds: _rows(inputs) < 0),
    _rule("global-lengths", "lengths of whole sequences told whether a rank is empty",
          lambda inputs, lengths, bounds: _rows(inputs) >= bounds[-1]),
    _rule("padding-kept", "rows behind the last request's were kept",
          lambda inputs, lengths, bounds: empty_rows(inputs) & (_rows(inputs) < bounds[-1])),
    _rule("padding-one-late", "the first row behind the last request's were its own",
          lambda inputs, lengths, bounds: _searched(inputs, lengths, bounds, right=True, padding=1)),
    _rule("padding-of-the-last-request", "rows behind the last request's were its own",
          lambda inputs, lengths, bounds: _searched(inputs, lengths, bounds, right=True, padding=1 << 40)),
    _rule("bound-to-the-request-before", "the first row of a request were the last of the one before",
          lambda inputs, lengths, bounds: _searched(inputs, lengths, bounds, right=False, padding=0)),
    _rule("starts-for-ends", "rows were looked up among the starts of requests",
          lambda inputs, lengths, bounds: _looked_up(
              inputs, lengths, torch.searchsorted(bounds[:-1], _rows(inputs), right=True), _rows(inputs) >= bounds[-1])),
    _rule("one-row-a-request", "every request had one row",
          lambda inputs, lengths, bounds: _looked_up(inputs, lengths, _rows(inputs), _rows(inputs) >= bounds[-1])),
    _rule("equal-rows-a-request", "every request had as many rows as any other", _by_equal_share),
    _rule("one-token-is-none", "a request of one token had none",
          lambda inputs, lengths, bounds: empty_rows(inputs) | _looked_up(
              inputs, lengths - (lengths == 1).to(lengths.dtype),
              torch.searchsorted(bounds[1:], _rows(inputs), right=True), _rows(inputs) >= bounds[-1])),
    _rule("last-row-only", "of an empty request only the last row were masked", _last_row_only),
    _rule("without-requests-nothing", "a call without requests masked no row",
          lambda inputs, lengths, bounds: empty_rows(inputs) & (lengths.numel() > 0)),
    _rule("the-others", "rows with something to add were masked",
          lambda inputs, lengths, bounds: ~empty_rows(inputs)),
    Mutant("first-head-only", "only the first head were masked", _first_head_only),
    Mutant("kept-rows-sanitised", "NaN and infinity in other rows were masked too", _sanitised),
    _filled("masked-with-zero", "an empty row said 0", 0.0),
    _filled("masked-with-nan", "an empty row said NaN", float("nan")),
    _filled("masked-with-infinity", "an empty row said infinity", float("inf")),
    _filled("masked-with-the-lowest", "an empty row said the lowest finite number", -3.4028234663852886e38),
)  # fmt: skip


def _request_by_request(inputs: Inputs) -> Outputs:
    """One request after the other, then what is left."""
    lse = _masked(inputs, _rows(inputs) < 0).lse
    if inputs.lengths is None or inputs.query_start is None:
        return Outputs(lse)
    bounds = inputs.query_start.tolist()
    for request, length in enumerate(inputs.lengths.tolist()):
        if length == 0:
            lse[bounds[request] : bounds[request + 1]] = _NOTHING
    lse[bounds[-1] :] = _NOTHING
    return Outputs(lse)


_EXACTLY = Precision(probability="exact", note="bits are kept")

HONEST: tuple[Honest, ...] = (
    Honest("row-by-row", _EXACTLY, reference),
    Honest("request-by-request", _EXACTLY, _request_by_request),
)
