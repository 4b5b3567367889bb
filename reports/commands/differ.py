"""`mla-oracle differ`: does a kernel answer alike wherever and however it runs?"""

import dataclasses
import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from cases.covering import LEVELS
from impl.implementation import machine_code_of
from reports.commands.shared import (
    RUNS,
    AiterOption,
    CaseOption,
    ImplOption,
    LevelOption,
    Misuse,
    OnOption,
    OpOption,
    SeedOption,
    VllmOption,
    WorkersOption,
    application,
    console_of,
    executions_of,
    one_of,
    seed_of,
    use_trees,
    workers_of,
)  # fmt: skip
from reports.plan import Selection, plan
from reports.record import Record
from reports.replaying import Trees
from reports.store import Settings, check_vacant, read_run, read_settings

if TYPE_CHECKING:
    from reports.differ import Way

_DEADLINE = 300.0
_POWERS = (1, 2, 4, 8, 16)


@application.command("differ")
def run_differ(
    op: OpOption = None,
    impl: ImplOption = None,
    on: OnOption = None,
    level: LevelOption = "smoke",
    case: CaseOption = None,
    warps: Annotated[
        str, typer.Option("--warps", help="Machine code also with so many waves a workgroup: 1,2,4,8.")
    ] = "",
    stages: Annotated[str, typer.Option("--stages", help="Machine code also with so many pipeline stages: 1,2.")] = "",
    against: Annotated[
        list[Path] | None,
        typer.Option(
            "--against", help="A run made elsewhere, as on a GPU; may be repeated. Two without --on: only these."
        ),
    ] = None,
    seed: SeedOption = 0,
    workers: WorkersOption = 0,
    deadline: Annotated[float, typer.Option("--deadline", help="Seconds for one case.")] = _DEADLINE,
    vllm: VllmOption = None,
    aiter: AiterOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A new directory of the runs; runs/<time> by default.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Keep the differences as JSON in this new file.")] = None,
) -> int:
    """The same questions in several executions and with several launch options: which answers are alike?

    What is selected is asked anew in every way; runs of `--against` bring all of their answers. 1 when one way passes a
    question and another does not, when bits differ that may not, or when nothing was compared.
    """
    # Runs that are there are enough, where nobody names an execution.
    executions = executions_of(on) if on or len(against or ()) < 2 else ()
    few, many = _numbers("--warps", warps, _POWERS), _numbers("--stages", stages, tuple(range(1, 9)))
    if (few or many) and not any(map(machine_code_of, executions)):
        raise Misuse("--warps, --stages: are for machine code, so --on should name isa:gfx942 or isa:gfx950 as well")
    differing = importlib.import_module("reports.differ")
    ways = differing.ways(executions, few, many)
    others = {path: read_settings(path) for path in against or ()}
    if len(ways) + len(others) < 2:
        raise Misuse(
            f"only {(*(way.name for way in ways), *others)[0]}: two ways are needed, by --on, --warps, --stages or --against"
        )
    if json is not None and (json.exists() or not json.resolve().parent.is_dir()):
        raise Misuse(f"--json {json}: should name a new file in a directory that exists")
    if not ways and (op or impl or case):
        raise Misuse(
            "--op, --impl, --case: say what is asked, and without --on nothing is; it should name an execution"
        )
    wanted = Selection(
        ops=tuple(op or ()), impls=tuple(impl or ()), on=executions, level=one_of("--cases", level, LEVELS),
        patterns=tuple(case or ()), seed=seed_of(seed),
    )  # fmt: skip
    settings = Settings(workers=workers_of(workers, executions), deadline=deadline)
    place = out if out is not None else RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-differ"
    if ways:
        check_vacant(place)
    console = console_of()
    answers = _asked(differing, ways, place, wanted, use_trees(vllm, aiter), settings, console)
    for path in others:
        answers |= _of_run(path)
    found = differing.compare(answers)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    differing.show(found, console)
    return 1 if found.findings or not found.compared else 0


def _numbers(option: str, text: str, allowed: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers between the commas, or `Misuse`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not word.isdigit() or int(word) not in allowed:
            raise Misuse(f"{option} {text}: should be some of {', '.join(map(str, allowed))} with commas between them")
    return tuple(dict.fromkeys(map(int, words)))


def _asked(
    differing: ModuleType, ways: "Sequence[Way]", place: Path, wanted: Selection, trees: Trees, how: Settings, console: Console
) -> dict[str, list[Record]]:  # fmt: skip
    """The records of each way, by its name; every way is swept into a directory of its own below `place`."""
    plans = {way.stem: plan(dataclasses.replace(wanted, on=(way.on,))) for way in ways}
    answers = {}
    for way in ways:
        settings = msgspec.structs.replace(
            how, created=time.time(), ops=wanted.ops, impls=wanted.impls, on=(way.on,), cases=wanted.level,
            patterns=wanted.patterns, seed=wanted.seed, vllm=str(trees.vllm or ""), aiter=str(trees.aiter or ""),
            ledgers=plans[way.stem].ledgers,
        )  # fmt: skip
        console.print(escape(f"{place / way.stem}: {way.name}"))
        run = differing.ask(way, place / way.stem, plans[way.stem], settings, console)
        answers[way.name] = list(run.records.values())
    return answers


def _of_run(path: Path) -> dict[str, list[Record]]:
    """The records of a run made elsewhere, by where they were made."""
    found: dict[str, list[Record]] = {}
    for record in read_run(path).records.values():
        found.setdefault(f"{path}: {record.on} {record.environment.arch}".strip(), []).append(record)
    return found
