"""`mla-oracle aot`: what do the Triton kernels take of a GPU that is not here, and do they fit?"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import cases as rooms
from cases.production import ARCHES
from impl.executions.aot.baseline import Comparison, compare
from impl.executions.aot.director import Event, Request
from impl.executions.aot.report import Report, ReportError, Row, Unasked, read_report
from impl.executions.aot.run import compile_all, triton_impls, unavailable
from reports.commands.shared import (
    AiterOption,
    ImplOption,
    Misuse,
    OpOption,
    VllmOption,
    WorkersOption,
    application,
    console_of,
    one_of,
    use_trees,
    workers_of,
)
from reports.html.aot import heaviest, write_aot
from reports.html.page import is_report
from reports.outputs.escaping import printable
from reports.outputs.files import OutputError, outside_runs, write
from reports.words import plural

_LISTED = 40
# How an aot.json begins.
_BEGINNING = re.compile(rb'\{\n "format": \d+,\n "triton": "')
_LOOKED_AT = 256


@application.command()
def aot(
    arch: Annotated[
        list[str] | None, typer.Option("--arch", help="gfx942 or gfx950; may be repeated, both without it.")
    ] = None,
    op: OpOption = None,
    impl: ImplOption = None,
    vllm: VllmOption = None,
    aiter: AiterOption = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", help="The aot.json of an earlier --out, to take no more than.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write aot.json and aot.html into this directory, which may be a run.")
    ] = None,
    workers: WorkersOption = 0,
) -> int:
    """Compile every Triton kernel for AMD GPUs that need not be here: registers, spills, memory, matrix instructions.

    1 where a kernel does not compile, takes more memory than there is, or grew beyond the baseline, and where a wrapper
    raises instead of launching.
    """
    arches = tuple(dict.fromkeys(one_of("--arch", word, ARCHES) for word in arch or ())) or ARCHES
    ops = dict.fromkeys(each for name in op or ("",) for each in (rooms.ops_named(name) if name else rooms.OPS))
    earlier = _earlier(baseline)
    _check_place(out, baseline)
    trees = use_trees(vllm, aiter)
    chosen = triton_impls(tuple(ops), tuple(impl or ()))
    if not chosen:
        raise Misuse(
            f"nothing to compile: no implementation named {' or '.join(impl or ('*triton*',))} of {', '.join(op or ('any op',))} "
            "is Triton's; `mla-oracle list` names them"
        )
    missing = unavailable()
    if missing:
        raise Misuse(f"aot: {missing}")
    request = Request(
        arches=arches, impls=chosen, workers=workers_of(workers), vllm=str(trees.vllm or ""), aiter=str(trees.aiter or "")
    )  # fmt: skip
    console = console_of()
    report = _compiled(request, console)
    compared = compare(earlier, report) if earlier is not None else None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write(out / "aot.json", msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
        write_aot(report, compared, out / "aot.html")
    _tell(report, compared, out, console)
    return int(is_closed(report, compared))


def is_closed(report: Report, compared: Comparison | None) -> bool:
    """Whether something does not compile or fit, or grew that must not."""
    return bool(report.failures or report.broken or (compared is not None and compared.closes))


def _earlier(baseline: Path | None) -> Report | None:
    if baseline is None:
        return None
    try:
        return read_report(baseline)
    except ReportError as error:
        raise Misuse(f"--baseline {error}") from error


def _check_place(out: Path | None, baseline: Path | None) -> None:
    """Nothing is compiled before there is a place to write to, and nobody's file is replaced."""
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise Misuse(f"--out {out}: is a file, should be a directory")
    rows, page = out / "aot.json", out / "aot.html"
    for path in (rows, page):
        try:
            outside_runs("--out", path)
        except OutputError as error:
            raise Misuse(str(error)) from error
    if page.exists() and not is_report(page):
        raise Misuse(f"--out {out}: holds an aot.html that is no report; it should be another directory")
    if rows.exists() and not _is_ours(rows):
        raise Misuse(f"--out {out}: holds an aot.json that is not of this command; it should be another directory")
    if baseline is not None and rows.exists() and rows.samefile(baseline):
        # Growth would be told once, and the next time be the measure.
        raise Misuse(f"--out {out}: holds the baseline, which it would replace; it should be another directory")


def _is_ours(path: Path) -> bool:
    """Whether this command wrote the file, in this format or another."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _BEGINNING.match(file.read(_LOOKED_AT)) is not None


def _compiled(request: Request, console: Console) -> Report:
    shown = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console,
        transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    with shown:
        task = shown.add_task("capturing launches", total=None)

        def progress(event: Event) -> None:
            words = {"description": f"capturing {escape(event.capturing)}"} if event.capturing else {}
            shown.update(task, completed=event.done, total=event.known or None, **words)  # type: ignore[arg-type]

        return compile_all(request, progress)


def _tell(report: Report, compared: Comparison | None, out: Path | None, console: Console) -> None:
    console.print(_table(report))
    _list("not asked", _reasons(report.unasked), console)
    _list("broke", [f"{each.op} {each.impl} on {each.arch}: {each.reasons[0]}" for each in report.broken], console)
    _list(
        "own kernel spills",
        [f"{row.place}: {_spilled(row)} [{row.configuration}]" for row in spilling(report)],
        console,
    )
    if compared is not None:
        counts = ", ".join(f"{count} {change}" for change, count in compared.counts.items())
        console.print(escape(f"against the baseline: {counts or 'nothing to compare'}"))
        _list("grew", [growth.sentence for growth in compared.growths if not growth.closes], console)
        _list("closes, grew", [growth.sentence for growth in compared.growths if growth.closes], console)
    _list(
        "fails",
        [f"{row.place}: {row.failure}: {row.sentence} [{row.configuration}]" for row in report.failures],
        console,
    )
    if out is not None:
        console.print(escape(f"{out / 'aot.json'}, {out / 'aot.html'}"))
    console.print(escape(verdict(report, compared)), style="bold")


def verdict(report: Report, compared: Comparison | None) -> str:
    """What came of it all, in one line."""
    kernels = len({(row.module, row.kernel) for row in report.rows})
    said = (
        f"{plural(len(report.rows), 'compilation')} of {plural(kernels, 'kernel')} for {' and '.join(report.arches)} by Triton "
        f"{report.triton}: {len(report.failures)} failed, {len(report.broken)} wrappers broke"
    )
    if compared is not None:
        said += f", {sum(growth.closes for growth in compared.growths)} grew beyond the baseline"
    return f"{said}; {report.compiled} compiled now in {report.seconds:.1f} s ({report.cpu:.1f} s of processors)"


def spilling(report: Report) -> tuple[Row, ...]:
    """This project's own kernels whose registers do not suffice."""
    return tuple(row for row in report.rows if row.is_own and row.resources is not None and row.resources.spills)


def _spilled(row: Row) -> str:
    assert row.resources is not None
    parts = (
        (row.resources.vgpr_spills, "vector registers"), (row.resources.sgpr_spills, "scalar registers"),
        (row.resources.scratch, "bytes of scratch"),
    )  # fmt: skip
    return ", ".join(f"{count} {what}" for count, what in parts if count)


def _table(report: Report) -> Table:
    """Of each kernel on each architecture its heaviest configuration, and how many it has."""
    registers = ("VGPR", "AGPR", "SGPR", "spills", "scratch", "LDS", "waves", "matrix", "code", "s")
    columns = ("library", "kernel", "arch", "of", *registers)
    table = Table(*columns, box=None)
    for row, count in heaviest(report.rows):
        found = row.resources
        if found is None:
            table.add_row(
                _library(row), escape(row.kernel), row.arch, str(count), *[""] * 7, row.failure, "", "", style="red"
            )
            continue
        matrix = " ".join(f"{number}×{name.removeprefix('v_')}" for name, number in found.matrix.items())
        table.add_row(
            _library(row), escape(row.kernel), row.arch, str(count), str(found.vgpr), str(found.agpr or ""), str(found.sgpr),
            f"{found.vgpr_spills}+{found.sgpr_spills}" if found.vgpr_spills or found.sgpr_spills else "",
            str(found.scratch or ""), str(found.lds or ""), f"{found.waves:g} by {found.limit}", matrix, str(found.code),
            f"{row.seconds:.1f}", style="red" if row.failure else None,
        )  # fmt: skip
    return table


def _library(row: Row) -> str:
    """Whose kernel it is."""
    package = row.module.partition(".")[0]
    return package if package in ("vllm", "aiter") else "ours"


def _reasons(unasked: Sequence[Unasked]) -> list[str]:
    """Each reason of each implementation once, with how many calls it is about."""
    found: dict[tuple[str, str, str], int] = {}
    for each in unasked:
        if not each.broke:
            key = each.op, each.impl, "; ".join(each.reasons)
            found[key] = found.get(key, 0) + 1
    return [f"{op} {impl}: {why} ({plural(count, 'call')})" for (op, impl, why), count in found.items()]


def _list(word: str, sentences: Sequence[str], console: Console) -> None:
    for sentence in sentences[:_LISTED]:
        console.print(escape(printable(f"{word}: {sentence}")), soft_wrap=True)
    if len(sentences) > _LISTED:
        console.print(f"{word}: {len(sentences) - _LISTED} more; --out DIR keeps them all")
