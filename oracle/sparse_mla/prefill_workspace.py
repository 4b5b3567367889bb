"""How much scratch memory does prefill ask for, where in the pool does it lie, and when does the pool refuse?

A layer with compress ratio r asks, for a step of T prefill tokens, for both views in one call:

    rows of a request    M = ([r > 0] ceil(max_len / r)) + window + max_batched
    gather buffer        [chunk_size, M, lanes] bfloat16      unless it reads its caches in place
    attention rows       [T, heads, lanes] bfloat16           on gfx950, whose output is MXFP8

In the warm-up T = max_batched. The pool lays the views of one call behind each other, the start of each rounded up to
256 bytes, and starts every call at byte 0 again: views of different calls share memory. It grows to the largest call
until it is locked after the warm-up; then a call that needs more is refused. The warm-up must therefore need as much as
any step may.
Sources: `forward_mqa` and `_prefill_workspace_shapes` of vLLM's DeepSeek V4.1 layer for ROCm; its `WorkspaceManager`.
"""

import dataclasses

import torch

from cases.memory import map_tensors, moved
from cases.precision import Precision
from cases.sparse_mla.prefill_workspace import Inputs, Outputs
from oracle.check import OFF_THE_SCALE, Check, exact
from oracle.laws import Honest, Law, Mutant

ALIGNMENT = 256
ELEMENT_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Faults:
    """Where a layer or a pool can go wrong; the defaults are right."""

    separate_calls: bool = False
    alignment: int = ALIGNMENT
    warm_up_tokens: int | None = None
    warm_up_forgets_rows: bool = False
    warm_up_forgets_gather: bool = False
    records_by_floor: bool = False
    records_of_ratio_0: bool = False
    no_records_of_ratio_1: bool = False
    without_window: bool = False
    window_before_query: bool = False
    without_batch: bool = False
    always_gathers: bool = False
    rows_everywhere: bool = False
    rows_nowhere: bool = False
    rows_of_whole_batch: bool = False
    one_request: bool = False
    float32_rows: bool = False
    last_call_counts: bool = False
    never_locked: bool = False
    layers_side_by_side: bool = False
    heads_multiple: int = 1


RIGHT = Faults()


def gather_rows(inputs: Inputs, ratio: int, faults: Faults = RIGHT) -> int:
    """Rows that the gather buffer holds for each request of a chunk."""
    records = 0
    if ratio > 0 and not (ratio == 1 and faults.no_records_of_ratio_1):
        records = inputs.max_len // ratio if faults.records_by_floor else -(-inputs.max_len // ratio)
    elif faults.records_of_ratio_0:
        records = inputs.max_len
    window = 0 if faults.without_window else inputs.window - faults.window_before_query
    return records + window + (0 if faults.without_batch else inputs.max_batched)


def views(
    inputs: Inputs, ratio: int, tokens: int, faults: Faults = RIGHT
) -> tuple[tuple[int, int, int] | None, tuple[int, int, int] | None]:
    """The shapes of the gather buffer and of the attention rows; None for what is not asked for."""
    gathered = rows = None
    if inputs.gathers or faults.always_gathers:
        requests = 1 if faults.one_request else inputs.chunk_size
        gathered = (requests, gather_rows(inputs, ratio, faults), inputs.lanes)
    if (inputs.arch == "gfx950" and not faults.rows_nowhere) or faults.rows_everywhere:
        heads = -(-inputs.heads // faults.heads_multiple) * faults.heads_multiple
        rows = (inputs.max_batched if faults.rows_of_whole_batch else tokens, heads, inputs.lanes)
    return gathered, rows


def _answer(inputs: Inputs, faults: Faults = RIGHT) -> Outputs:
    ratios = inputs.ratios.tolist()
    warm_up = inputs.max_batched if faults.warm_up_tokens is None else min(faults.warm_up_tokens, inputs.max_batched)
    asks = [(ratio, warm_up, True) for ratio in ratios]
    steps = zip(inputs.layers.tolist(), inputs.tokens.tolist(), strict=True)
    asks += [(ratios[layer], tokens, False) for layer, tokens in steps]
    capacity, base = 0, 0
    found: list[tuple[list[int], list[int], list[int], int, int]] = []
    for ratio, tokens, is_warm_up in asks:
        gathered, rows = views(inputs, ratio, tokens, faults)
        if is_warm_up and faults.warm_up_forgets_rows:
            rows = None
        if is_warm_up and faults.warm_up_forgets_gather:
            gathered = None
        starts, needed = _laid_out((gathered, rows), faults)
        if faults.layers_side_by_side and is_warm_up:
            starts = [start + base if start >= 0 else start for start in starts]
            needed += base
            base = needed
        granted = needed <= capacity or is_warm_up or faults.never_locked
        if granted:
            capacity = needed if faults.last_call_counts else max(capacity, needed)
        starts = starts if granted else [-1, -1]
        found.append((list(gathered or (0, 0, 0)), list(rows or (0, 0, 0)), starts, needed, int(granted)))
    return Outputs(*(torch.tensor(column, dtype=torch.int64) for column in zip(*found, strict=True)))


def _laid_out(shapes: tuple[tuple[int, int, int] | None, ...], faults: Faults) -> tuple[list[int], int]:
    """The start of each view, and the bytes of them all."""
    starts, end = [], 0
    for number, shape in enumerate(shapes):
        if shape is None:
            starts.append(-1)
            continue
        size = shape[0] * shape[1] * shape[2] * (4 if faults.float32_rows and number else ELEMENT_BYTES)
        start = 0 if faults.separate_calls else end
        starts.append(start)
        end = max(end, start + -(-size // faults.alignment) * faults.alignment)
    return starts, end


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Outputs:
    """What each ask is and gets, as the pool's life goes on; `dtype` has no say in integers.

    Raises ValueError when a layer that gathers nothing asks for attention rows off gfx950, where it has no MXFP8 output,
    and for a negative ratio.
    """
    del dtype
    if not inputs.gathers and inputs.arch != "gfx950" and inputs.layers.numel():
        raise ValueError(f"arch={inputs.arch}: should be gfx950 for a layer that asks for the rows of an MXFP8 output")
    if bool((inputs.ratios < 0).any()):
        raise ValueError(f"ratio={int(inputs.ratios.min())}: should not be negative")
    return _answer(inputs)


def judge(inputs: Inputs, outputs: Outputs, precision: Precision) -> tuple[Check, ...]:
    """What any use of the memory needs, then every number."""
    del precision
    want = reference(inputs)
    names = [field.name for field in dataclasses.fields(Outputs)]
    checks = [
        exact(name, getattr(outputs, name), getattr(want, name), why="what a layer asks for is exact") for name in names
    ]
    if all(getattr(outputs, name).shape == getattr(want, name).shape for name in names):
        checks += [_apart(outputs), _bounded(inputs, outputs)]
    return tuple(checks)


def _plan_check(output: str, count: int, wrong: list[tuple[int, str, str]], why: str) -> Check:
    if not wrong:
        return Check(output=output, measure="plan", use=0.0, count=max(count, 1), got="kept", want="kept")
    ask, got, want = wrong[0]
    return Check(
        output=f"{output} of ask", measure="plan", use=OFF_THE_SCALE, wrong=len(wrong), count=max(count, 1),
        where=(ask,), got=got, want=want, why=why,
    )  # fmt: skip


def _apart(outputs: Outputs) -> Check:
    """Both views of an ask lie in memory of their own."""
    wrong = []
    for ask, (gathered, (start, other)) in enumerate(
        zip(outputs.gathered.tolist(), outputs.starts.tolist(), strict=True)
    ):
        end = start + gathered[0] * gathered[1] * gathered[2] * ELEMENT_BYTES
        if start >= 0 and 0 <= other < end:
            wrong.append((ask, f"rows from byte {other}", f"byte {end} or later"))
    return _plan_check("memory", len(outputs.starts), wrong, "the gathered keys and the attention rows are one memory")


def _bounded(inputs: Inputs, outputs: Outputs) -> Check:
    """No step that keeps to the limits is refused."""
    first = inputs.ratios.numel()
    wrong = [
        (first + step, "refused", "granted")
        for step, tokens in enumerate(inputs.tokens.tolist())
        if tokens <= inputs.max_batched and not int(outputs.granted[first + step])
    ]
    return _plan_check(
        "grant", len(outputs.starts), wrong, "the warm-up did not reserve what a step within its limits needs"
    )


def _edited(inputs: Inputs, **changes: object) -> Inputs:
    fresh = map_tensors(inputs, lambda tensor: moved(tensor, "cpu"))
    return dataclasses.replace(fresh, **changes)  # type: ignore[arg-type]


def _picked(answer: Outputs, order: torch.Tensor) -> Outputs:
    return Outputs(*(getattr(answer, field.name)[order] for field in dataclasses.fields(answer)))


def _steps_reversed(inputs: Inputs) -> Inputs:
    return _edited(inputs, layers=inputs.layers.flip(0), tokens=inputs.tokens.flip(0))


def _reversed_steps(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    count, steps = inputs.ratios.numel(), inputs.layers.numel()
    return _picked(first, torch.cat((torch.arange(count), count + torch.arange(steps).flip(0))))


def _layers_reversed(inputs: Inputs) -> Inputs:
    return _edited(inputs, ratios=inputs.ratios.flip(0), layers=inputs.ratios.numel() - 1 - inputs.layers)


def _reversed_layers(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del edited
    count, steps = inputs.ratios.numel(), inputs.layers.numel()
    return _picked(first, torch.cat((torch.arange(count).flip(0), count + torch.arange(steps))))


def _within_limits(inputs: Inputs) -> Inputs:
    return _edited(inputs, tokens=inputs.tokens.clamp(max=inputs.max_batched))


def _all_granted(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del inputs, edited
    return dataclasses.replace(first, granted=torch.ones_like(first.granted))


def _granted(answer: Outputs) -> torch.Tensor:
    return answer.granted


def _in_place(inputs: Inputs) -> Inputs | None:
    if not inputs.gathers or inputs.arch != "gfx950":
        return None
    # Within the limits, so that nothing is refused.
    return _edited(_within_limits(inputs), gathers=False)


def _rows_first(first: Outputs, inputs: Inputs, edited: Inputs) -> Outputs:
    del first
    answer = _answer(_within_limits(inputs))
    size = answer.rows.prod(dim=1) * ELEMENT_BYTES
    return Outputs(
        torch.zeros_like(answer.gathered), answer.rows,
        torch.stack((torch.full_like(size, -1), torch.zeros_like(size)), dim=1),
        (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, torch.ones_like(answer.granted),
    )  # fmt: skip


LAWS: tuple[Law, ...] = (
    Law("W1 steps reversed", "what a step gets of a locked pool does not depend on the steps before", _steps_reversed,
        _reversed_steps, "bitwise"),
    Law("W2 layers reversed", "the order of the warm-up does not matter", _layers_reversed, _reversed_layers, "bitwise"),
    Law("W3 within the limits", "the warm-up reserves what any step within the limits needs", _within_limits,
        _all_granted, "bitwise", view=_granted),
    Law("W4 in place", "layers that do not gather find their rows at the start of the pool", _in_place, _rows_first,
        "bitwise"),
)  # fmt: skip


def _mutant(name: str, pitfall: str, faults: Faults) -> Mutant:
    return Mutant(name, pitfall, lambda inputs: _answer(inputs, faults))


MUTANTS: tuple[Mutant, ...] = (
    _mutant("asked-in-two-calls", "the buffers were asked for one after the other, so that they share memory",
            Faults(separate_calls=True)),
    _mutant("views-unaligned", "a view started right behind the one before", Faults(alignment=2)),
    _mutant("views-aligned-to-512", "views started at multiples of 512 bytes", Faults(alignment=512)),
    _mutant("warm-up-with-one-token", "the warm-up reserved the rows of one token", Faults(warm_up_tokens=1)),
    _mutant("warm-up-without-rows", "the warm-up left the attention rows out", Faults(warm_up_forgets_rows=True)),
    _mutant("warm-up-without-gather", "the warm-up left the gather buffer out", Faults(warm_up_forgets_gather=True)),
    _mutant("records-by-floor", "the last record, not full, had no row", Faults(records_by_floor=True)),
    _mutant("records-without-a-cache", "layers of ratio 0 gathered a record per token", Faults(records_of_ratio_0=True)),
    _mutant("ratio-1-without-records", "layers of ratio 1 had no compressed cache", Faults(no_records_of_ratio_1=True)),
    _mutant("window-left-out", "the window had no rows", Faults(without_window=True)),
    _mutant("window-of-one-less", "the window had a row less", Faults(window_before_query=True)),
    _mutant("batch-left-out", "the new tokens had no rows", Faults(without_batch=True)),
    _mutant("gather-in-place", "layers that read their caches in place gathered", Faults(always_gathers=True)),
    _mutant("rows-off-gfx950", "every architecture had an MXFP8 output", Faults(rows_everywhere=True)),
    _mutant("no-rows-on-gfx950", "no architecture had an MXFP8 output", Faults(rows_nowhere=True)),
    _mutant("rows-of-a-whole-batch", "every step asked for the rows of the largest", Faults(rows_of_whole_batch=True)),
    _mutant("one-request-a-chunk", "the gather buffer held one request", Faults(one_request=True)),
    _mutant("rows-in-float32", "the attention rows were float32", Faults(float32_rows=True)),
    _mutant("last-call-counts", "the pool kept what the last call needed, not the most", Faults(last_call_counts=True)),
    _mutant("pool-grows-on", "the pool were never locked", Faults(never_locked=True)),
    _mutant("layers-side-by-side", "every layer had memory of its own in the warm-up", Faults(layers_side_by_side=True)),
    _mutant("heads-padded", "attention rows had a multiple of 16 heads", Faults(heads_multiple=16)),
)  # fmt: skip


def _by_columns(inputs: Inputs) -> Outputs:
    """All asks at once, column by column."""
    ratio = torch.cat((inputs.ratios, inputs.ratios[inputs.layers]))
    tokens = torch.cat((torch.full_like(inputs.ratios, inputs.max_batched), inputs.tokens))
    records = (inputs.max_len + ratio - 1) // ratio.clamp(min=1) * (ratio > 0)
    each = torch.ones_like(ratio)
    gathered = torch.stack(
        (each * inputs.chunk_size, records + inputs.window + inputs.max_batched, each * inputs.lanes), dim=1
    ) * int(inputs.gathers)
    has_rows = inputs.arch == "gfx950"
    rows = torch.stack((tokens, each * inputs.heads, each * inputs.lanes), dim=1) * int(has_rows)
    sizes = [(view.prod(dim=1) * ELEMENT_BYTES + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT for view in (gathered, rows)]
    needed = sizes[0] + sizes[1]
    granted = needed <= needed[: inputs.ratios.numel()].max()
    starts = torch.stack((each * (0 if inputs.gathers else -1), sizes[0] if has_rows else -each), dim=1)
    return Outputs(gathered, rows, torch.where(granted[:, None], starts, -1), needed, granted.to(torch.int64))


HONEST: tuple[Honest, ...] = (
    Honest("one-by-one", Precision(probability="exact", note="integers"), reference),
    Honest("all-at-once", Precision(probability="exact", note="integers"), _by_columns),
)
