"""Where does a query head of a folded call stand, and where does its answer come back?

With S query tokens a request and F groups of 16 heads, row r = b S + t and head h = 16 f + i:

    folded[(b F + f) S + t, i] = query[r, h]        out[r, h] = folded_out[(b F + f) S + t, i], and lse alike

bit for bit: every group of 16 heads becomes a request of S tokens, next to the request's other groups. Source: the
folding of query rows round the persistent decode kernels of AITER, `mla_decode_fwd`, which serve 32 to 128 heads so.
"""

import dataclasses
from collections.abc import Callable

import torch

from cases.dense_mla.fold_rows import HEADS, Inputs, Outputs
from cases.memory import guarded_copy
from cases.precision import Precision
from oracle.check import Check, exact
from oracle.laws import Honest, Law, Mutant

# From a row's request, token, group and head in the group, and the number of requests, to where it stands folded.
Place = Callable[["_Sizes", int, int, int, int], tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Requests, their query tokens, and groups of 16 heads."""

    requests: int
    tokens: int
    groups: int


def folded_place(sizes: _Sizes, b: int, t: int, f: int, i: int) -> tuple[int, int]:
    """The folded row and head of head i in group f of token t of request b."""
    return (b * sizes.groups + f) * sizes.tokens + t, i


def _sizes(inputs: Inputs) -> _Sizes:
    return _Sizes(
        inputs.query.shape[0] // inputs.query_tokens, inputs.query_tokens, inputs.query.shape[1] // HEADS
    )  # fmt: skip


def _table(sizes: _Sizes, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [rows, heads]: the folded row, and the folded head, of every row's every head."""
    rows = [
        [place(sizes, b, t, f, i) for f in range(sizes.groups) for i in range(HEADS)]
        for b in range(sizes.requests)
        for t in range(sizes.tokens)
    ]
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, sizes.groups * HEADS, 2)
    return table[..., 0], table[..., 1]


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """Folded queries and the answer unfolded, in new tensors; `dtype` changes nothing.

    Raises ValueError for heads that are no multiple of 16, rows that are no whole requests, and an answer of another
    number of rows.
    """
    del dtype
    rows, heads, _ = inputs.query.shape
    if heads % HEADS:
        raise ValueError(f"heads={heads}: should be a multiple of {HEADS}")
    if inputs.query_tokens < 1 or rows % inputs.query_tokens:
        raise ValueError(f"rows={rows}: should be a multiple of the query tokens, {inputs.query_tokens}")
    for name, answer in (("folded_out", inputs.folded_out), ("folded_lse", inputs.folded_lse)):
        if answer.shape[0] != rows * heads // HEADS:
            raise ValueError(f"{name}={answer.shape[0]} rows: should be {rows * heads // HEADS}")
    return _answered(inputs)


def _answered(
    inputs: Inputs, query: Place = folded_place, out: Place = folded_place, lse: Place = folded_place
) -> Outputs:
    sizes = _sizes(inputs)
    given = _bits(inputs.query)
    folded = torch.empty((given.shape[0] * sizes.groups, HEADS, given.shape[2]), dtype=given.dtype)
    folded[_table(sizes, query)] = given.cpu()
    return Outputs(
        folded=folded.view(inputs.query.dtype),
        out=_bits(inputs.folded_out).cpu()[_table(sizes, out)].view(inputs.folded_out.dtype),
        lse=inputs.folded_lse.cpu()[_table(sizes, lse)],
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16}[tensor.element_size()])


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """Queries, output and log-sum-exp, bit for bit."""
    del precision
    want = reference(inputs)
    return (
        exact("folded", outputs.folded, want.folded, why="every 16 heads of a request are a request of their own"),
        exact("out", outputs.out, want.out, why="the answer of the head that was sent there"),
        exact("lse", outputs.lse, want.lse, why="the log-sum-exp of the head that was sent there"),
    )


def _requests_reversed(rows: torch.Tensor, requests: int) -> torch.Tensor:
    return torch.cat(rows.chunk(requests)[::-1]) if requests else rows.clone()


def _turned_over(inputs: Inputs) -> Inputs:
    count = _sizes(inputs).requests
    return dataclasses.replace(
        inputs,
        query=guarded_copy(_requests_reversed(inputs.query, count)),
        folded_out=guarded_copy(_requests_reversed(inputs.folded_out, count)),
        folded_lse=guarded_copy(_requests_reversed(inputs.folded_lse, count)),
    )


def _turned_back(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    count = _sizes(inputs).requests
    return Outputs(*(_requests_reversed(part, count) for part in (first.folded, first.out, first.lse)))


def _echoing(inputs: Inputs) -> Inputs | None:
    """A kernel that returns the beginning of every query head it was handed."""
    if inputs.query.dtype != inputs.folded_out.dtype:
        return None
    echo = _answered(inputs).folded[..., : inputs.folded_out.shape[-1]]
    return dataclasses.replace(inputs, folded_out=guarded_copy(echo))


def _echoed(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    return dataclasses.replace(first, out=inputs.query[..., : inputs.folded_out.shape[-1]].contiguous())


def _tokens_apart(inputs: Inputs) -> Inputs | None:
    """One group of heads: then a request's tokens are requests as well."""
    return dataclasses.replace(inputs, query_tokens=1) if _sizes(inputs).groups == 1 else None


def _same(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return first


LAWS: tuple[Law, ...] = (
    Law("J2 requests reversed", "a request does not depend on its neighbours", _turned_over, _turned_back, "bitwise"),
    Law("J1 folded and back", "what comes back for a head is what was sent for it", _echoing, _echoed, "bitwise"),
    Law("F1 nothing to fold", "16 heads stay where they are, however many tokens there are", _tokens_apart, _same,
        "bitwise"),
)  # fmt: skip


def _tokens_outside(sizes: _Sizes, b: int, t: int, f: int, i: int) -> tuple[int, int]:
    return (b * sizes.tokens + t) * sizes.groups + f, i


def _groups_outside(sizes: _Sizes, b: int, t: int, f: int, i: int) -> tuple[int, int]:
    return (f * sizes.requests + b) * sizes.tokens + t, i


def _heads_in_turn(sizes: _Sizes, b: int, t: int, f: int, i: int) -> tuple[int, int]:
    head = HEADS * f + i
    return folded_place(sizes, b, t, head % sizes.groups, head // sizes.groups)


def _groups_backwards(sizes: _Sizes, b: int, t: int, f: int, i: int) -> tuple[int, int]:
    return folded_place(sizes, b, t, sizes.groups - 1 - f, i)


def _heads_backwards(sizes: _Sizes, b: int, t: int, f: int, i: int) -> tuple[int, int]:
    return folded_place(sizes, b, t, f, HEADS - 1 - i)


def _next_token(sizes: _Sizes, b: int, t: int, f: int, i: int) -> tuple[int, int]:
    return folded_place(sizes, b, (t + 1) % sizes.tokens, f, i)


def _folds(inputs: Inputs) -> bool:
    return _sizes(inputs).groups > 1


def _everywhere(name: str, pitfall: str, place: Place) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _answered(inputs, place, place, place))


MUTANTS: tuple[Mutant, ...] = (
    Mutant("lse-by-tokens", "the log-sum-exp came back token by token",
           lambda inputs: _answered(inputs, lse=_tokens_outside)),
    Mutant("lse-by-groups", "the log-sum-exp came back group by group",
           lambda inputs: _answered(inputs, lse=_groups_outside)),
    Mutant("lse-left-folded", "the log-sum-exp kept its folded rows",
           lambda inputs: dataclasses.replace(_answered(inputs), lse=inputs.folded_lse.clone())
           if _folds(inputs) else None),
    Mutant("output-by-tokens", "the output came back token by token",
           lambda inputs: _answered(inputs, out=_tokens_outside)),
    Mutant("queries-by-tokens", "the queries were folded token by token",
           lambda inputs: _answered(inputs, query=_tokens_outside)),
    _everywhere("folded-by-tokens", "rows were folded token by token, there and back", _tokens_outside),
    _everywhere("folded-by-groups", "rows were folded group by group, there and back", _groups_outside),
    _everywhere("heads-dealt-in-turn", "heads were dealt to the groups in turn", _heads_in_turn),
    _everywhere("groups-backwards", "the groups of a request stood the other way round", _groups_backwards),
    _everywhere("heads-backwards", "the heads of a group stood the other way round", _heads_backwards),
    _everywhere("next-tokens-row", "every token stood in the next one's row", _next_token),
    Mutant("never-folded", "the queries kept their rows",
           lambda inputs: dataclasses.replace(_answered(inputs), folded=inputs.query.clone()) if _folds(inputs) else None),
)  # fmt: skip


def _by_permuting(inputs: Inputs) -> Outputs:
    """Dimensions exchanged, nothing computed."""
    sizes = _sizes(inputs)
    query = inputs.query.reshape(sizes.requests, sizes.tokens, sizes.groups, HEADS, inputs.query.shape[2])

    def back(answer: torch.Tensor, *width: int) -> torch.Tensor:
        parts = answer.reshape(sizes.requests, sizes.groups, sizes.tokens, HEADS, *width)
        return parts.transpose(1, 2).reshape(sizes.requests * sizes.tokens, sizes.groups * HEADS, *width)

    return Outputs(
        folded=query.transpose(1, 2).reshape(-1, HEADS, inputs.query.shape[2]),
        out=back(inputs.folded_out, inputs.folded_out.shape[2]),
        lse=back(inputs.folded_lse),
    )


HONEST: tuple[Honest, ...] = (
    Honest("head-by-head", Precision(probability="exact"), reference),
    Honest("by-permuting", Precision(probability="exact"), _by_permuting),
)
