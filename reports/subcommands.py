"""What does each subcommand of `mla-oracle` do, and how does it say that it was asked for the impossible?"""

import dataclasses
import fnmatch
import importlib
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import cases as rooms
from cases.case import Case, CaseError, case_type, parse
from cases.covering import LEVELS, Level, sweep_cases
from impl.implementation import EXECUTIONS, Execution, implementations
from impl.sources import aiter as aiter_source
from impl.sources import vllm as vllm_source
from impl.sources.settings import use_aiter, use_vllm
from impl.sources.source_tree import SourceError
from oracle.check import Status
from reports.capsule import CapsuleError, read_capsule, write_capsule
from reports.environment import default_execution, environment, unavailable
from reports.execute import HARNESS, attempt
from reports.execute import sentence as sentence_of
from reports.plan import AGAINST, Selection, SelectionError, chosen_impls, chosen_ops, find_impl, plan
from reports.record import Record
from reports.store import Run, Settings, StoreError, create_run, read_run, read_settings
from reports.sweep import exit_code, sweep

W = TypeVar("W", bound=str)

_RUNS = Path("runs")
_LISTED_GROUPS = 20
_DEVICE_WORKERS = 8
_DEADLINE = 300.0
_STATUSES: tuple[Status, ...] = get_args(Status)

application = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False,
    help="Is this kernel right, everywhere it claims to be, and what changed since yesterday?",
)  # fmt: skip

OpOption = Annotated[list[str] | None, typer.Option("--op", help="An op or a family; may be repeated.")]
ImplOption = Annotated[
    list[str] | None, typer.Option("--impl", help="An implementation, or vllm-* for several; may be repeated.")
]
OnOption = Annotated[
    list[str] | None, typer.Option("--on", help="Where they run: interpreter, cuda, hip; may be repeated.")
]
LevelOption = Annotated[str, typer.Option("--cases", help="How much is asked: smoke, default or nightly.")]
CaseOption = Annotated[
    list[str] | None, typer.Option("--case", help="A case id, or axis=value|value,...; may be repeated.")
]
VllmOption = Annotated[Path | None, typer.Option("--vllm", help="A vLLM checkout, installation or unpacked wheel.")]
AiterOption = Annotated[Path | None, typer.Option("--aiter", help="An AITER checkout, installation or unpacked wheel.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Moves the seed of every case.")]
WorkersOption = Annotated[int, typer.Option("--workers", help="Worker processes; 0 for one per processor.")]


@dataclasses.dataclass(frozen=True)
class Trees:
    """The source trees that the user pointed at; None where the installed one is meant."""

    vllm: Path | None = None
    aiter: Path | None = None

    @property
    def words(self) -> str:
        """The options that name them, for a line to run again; empty or with a blank in front."""
        return "".join(
            f" --{name} {shlex.quote(str(path))}"
            for name, path in (("vllm", self.vllm), ("aiter", self.aiter))
            if path is not None
        )

    @classmethod
    def of(cls, settings: Settings) -> "Trees":
        """Those of a run."""
        return cls(*(Path(text) if text else None for text in (settings.vllm, settings.aiter)))


class Misuse(Exception):
    """What the user asked for cannot be; the message says what would be right."""


def run(arguments: Sequence[str]) -> int:
    """The exit code of the command line; every misuse is one sentence on stderr and 2."""
    try:
        code = application(list(arguments), prog_name="mla-oracle", standalone_mode=False)
        return int(code or 0)
    except (Misuse, SelectionError, CaseError, StoreError, CapsuleError, rooms.UnknownOp) as error:
        return _misused(str(error))
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("mla-oracle: interrupted", err=True)
        return 130
    except Exception as error:
        if hasattr(error, "format_message"):
            # What typer's own parser could not read.
            return _misused(str(error.format_message()))
        if isinstance(error, OSError):
            return _misused(
                f"{error.filename or 'a file'}: {error.strerror or error}; it should be a place to write to"
            )
        typer.echo(f"mla-oracle: the harness itself broke: {sentence_of(error)}", err=True)
        return 3


def _misused(sentence: str) -> int:
    typer.echo(f"mla-oracle: {' '.join(sentence.split())}", err=True)
    return 2


def _console() -> Console:
    console = Console(highlight=False, soft_wrap=True)
    # A pipe has no width: nothing is cut off there.
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=200)


def _one_of(option: str, word: str, allowed: Iterable[W]) -> W:
    for known in allowed:
        if word == known:
            return known
    raise Misuse(f"{option} {word}: should be one of {', '.join(allowed)}")


def _executions(words: Sequence[str] | None) -> tuple[Execution, ...]:
    chosen = tuple(dict.fromkeys(_one_of("--on", word, EXECUTIONS) for word in words or ()))
    for on in chosen:
        reasons = unavailable(on)
        if on != "interpreter" and reasons:
            raise Misuse(f"--on {on}: {'; '.join(reasons)}")
    return chosen or (default_execution(),)


def _trees(vllm: Path | None, aiter: Path | None) -> Trees:
    """The trees that the user pointed at, from which kernels come from now on."""
    found = Trees(_tree("--vllm", vllm, vllm_source.locate), _tree("--aiter", aiter, aiter_source.locate))
    use_vllm(found.vllm)
    use_aiter(found.aiter)
    return found


def _tree(option: str, path: Path | None, locate: Callable[[Path], object]) -> Path | None:
    if path is None:
        return None
    package = option.removeprefix("--")
    kind = {"vllm": "a vLLM", "aiter": "an AITER"}[package]
    if path.is_file():
        raise Misuse(f"{option} {path}: is a file; unpack it, and name the directory that holds {package}/")
    if not path.is_dir():
        raise Misuse(
            f"{option} {path}: no such directory; it should be {kind} checkout, installation or unpacked wheel"
        )
    found = path.resolve()
    try:
        locate(found)
    except SourceError as error:
        raise Misuse(f"{option} {path}: {error}") from error
    return found


@application.command("list")
def list_ops(op: OpOption = None, level: LevelOption = "default") -> None:
    """Ops, their axes, how many cases are asked, and who answers."""
    chosen = _one_of("--cases", level, LEVELS)
    console = _console()
    for name in chosen_ops(Selection(ops=tuple(op or ()))):
        module = rooms.op_module("cases", name)
        asked = sweep_cases(name, chosen)
        answering = ", ".join(impl.name for impl in implementations(name)) or "nobody yet"
        console.print(f"{name}: {len(asked)} {chosen} cases, answered by {answering}")
        values = {**module.AXES, **(module.NIGHTLY if chosen == "nightly" else {})}
        for axis in case_type(name).axes()[:-1]:
            swept = [rooms.case.spell(value) for value in values[axis]]
            # What only regressions ask for belongs to the axis too.
            also = dict.fromkeys(word for case in asked if (word := rooms.case.spell(case.settings[axis])) not in swept)
            more = f" (and {', '.join(also)})" if also else ""
            console.print(f"  {axis} = {' | '.join(swept)}{more}")


@application.command("sweep")
def run_sweep(
    op: OpOption = None,
    impl: ImplOption = None,
    on: OnOption = None,
    level: LevelOption = "default",
    case: CaseOption = None,
    failed: Annotated[Path | None, typer.Option("--failed", help="Ask the failures of this run again.")] = None,
    seed: SeedOption = 0,
    workers: WorkersOption = 0,
    deadline: Annotated[float, typer.Option("--deadline", help="Seconds for one case.")] = _DEADLINE,
    laws: Annotated[bool, typer.Option("--laws", help="Ask about every law of the ops too.")] = False,
    vllm: VllmOption = None,
    aiter: AiterOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="A new run directory; runs/<time> by default.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Finish this run; takes nothing but it.")] = None,
    allow_unjudged: Annotated[
        bool, typer.Option("--allow-unjudged", help="0 even if nothing could be judged.")
    ] = False,
) -> int:
    """Ask implementations the cases of ops, and keep a record of every answer."""
    console = _console()
    if resume is not None:
        chosen = any((op, impl, on, case, failed, laws, vllm, aiter, out, seed, workers))
        if chosen or level != "default" or deadline != _DEADLINE:
            raise Misuse(f"--resume {resume}: the run's own settings hold, no selection, tree or --out may be given")
        read_settings(resume)
        path = resume
    else:
        wanted = Selection(
            ops=tuple(op or ()), impls=tuple(impl or ()), on=_executions(on),
            level=_one_of("--cases", level, LEVELS), patterns=tuple(case or ()), failed=failed,
            seed=_not_negative("--seed", seed), laws=laws,
        )  # fmt: skip
        path = _new_run(wanted, _trees(vllm, aiter), _workers(workers, wanted.on), deadline, out, console)
    try:
        done = sweep(path, console)
    except KeyboardInterrupt:
        typer.echo(
            f"mla-oracle: interrupted; continue with: mla-oracle sweep --resume {shlex.quote(str(path))}", err=True
        )
        return 130
    _summarise(done, console)
    return exit_code(done, allow_unjudged)


def _new_run(
    wanted: Selection, trees: Trees, workers: int, deadline: float, out: Path | None, console: Console
) -> Path:
    """Plan, then create the run directory: nothing is written before everything that was asked for exists."""
    if not 0 < deadline < 1e6:
        raise Misuse(f"--deadline {deadline:g}: should be more than 0 seconds")
    if wanted.laws and wanted.failed is not None:
        raise Misuse("--laws --failed: what failed is asked again, laws among it; no others can be chosen")
    found = plan(wanted)
    path = out if out is not None else _RUNS / time.strftime("%Y%m%d-%H%M%S")
    settings = Settings(
        created=time.time(), ops=wanted.ops, impls=wanted.impls, on=wanted.on, cases=wanted.level,
        patterns=wanted.patterns, failed=str(wanted.failed or ""), seed=wanted.seed, workers=workers, deadline=deadline,
        vllm=str(trees.vllm or ""), aiter=str(trees.aiter or ""), laws=wanted.laws, ledgers=found.ledgers,
    )  # fmt: skip
    create_run(path, settings, found.tasks)
    about_laws = sum(bool(task.law) for task in found.tasks)
    answers = _counted(len(found.tasks) - about_laws, "answer")
    laws = f" and {_counted(about_laws, 'answer')} about laws" if about_laws else ""
    asked = _counted(len({task.case for task in found.tasks}), "case")
    console.print(f"{path}: {answers} to {asked}{laws} on {', '.join(wanted.on)}")
    for ledger in found.ledgers:
        console.print(f"  {ledger}")
    return path


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _workers(asked: int, executions: Sequence[Execution] = ()) -> int:
    if asked < 0:
        raise Misuse(f"--workers {asked}: should be 1 or more, or 0 for one per processor")
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Every worker on a device holds a context there, half a gigabyte and more.
    return asked or (processors if set(executions) <= {"interpreter"} else min(processors, _DEVICE_WORKERS))


def _not_negative(option: str, number: int) -> int:
    if number < 0:
        raise Misuse(f"{option} {number}: should not be negative")
    return number


def _summarise(run: Run, console: Console) -> None:
    records = list(run.records.values())
    console.print(_table(records))
    groups: dict[tuple[str, str, str, str], list[Record]] = {}
    for record in records:
        if record.status in AGAINST:
            asked = f"{record.op} laws" if record.law else record.op
            groups.setdefault((asked, record.impl, record.on, record.status), []).append(record)
    for (op, impl, on, status), found in list(groups.items())[:_LISTED_GROUPS]:
        worst = max(found, key=lambda record: record.use)
        console.print(escape(f"{op} {impl} {on}: {len(found)} {status}, such as: {_first_sentence(worst)}"))
        for line in worst.diagnosis:
            console.print(escape(f"  {line}"))
        console.print(escape(f"  see it again: {replay_line(worst, Trees.of(run.settings))}"))
    if groups:
        console.print(f"all of them: mla-oracle show {shlex.quote(str(run.path))}")
    unanswered: dict[tuple[str, str], Counter[str]] = {}
    for record in records:
        if record.status == "unsupported":
            unanswered.setdefault((record.impl, record.on), Counter()).update(record.reasons[:1])
    for (impl, on), reasons in unanswered.items():
        reason, times = reasons.most_common(1)[0]
        more = f", and {len(reasons) - 1} other reasons" if len(reasons) > 1 else ""
        console.print(escape(f"{impl} on {on} did not answer {sum(reasons.values())} times: {reason} ({times}){more}"))
    if records and all(record.status == "unsupported" for record in records):
        console.print("nothing was judged, so this is no pass; --allow-unjudged accepts it", style="bold")
    for note in run.notes:
        console.print(escape(note))
    if run.open_tasks:
        console.print(
            f"{len(run.open_tasks)} cases have no record: the sessions ended without them, see {run.path / 'logs'}",
            style="bold",
        )


def _table(records: Sequence[Record]) -> Table:
    rows: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        asked = f"{record.op} laws" if record.law else record.op
        rows.setdefault((asked, record.impl, record.on), []).append(record)
    statuses = [status for status in _STATUSES if any(record.status == status for record in records)]
    table = Table("op", "implementation", "on", *statuses, "worst use", box=None)
    for (asked, impl, on), found in rows.items():
        counts = Counter(record.status for record in found)
        judged = [record.use for record in found if record.status in ("pass", "fail")]
        numbers = [str(counts[status] or ".") for status in statuses]
        table.add_row(asked, impl, on, *numbers, f"{max(judged):.3g}" if judged else "")
    return table


def _first_sentence(record: Record) -> str:
    failing = [check for check in record.checks if not check.passed] or list(record.checks)
    worst = max(failing, key=lambda check: check.use, default=None)
    return str(worst) if worst is not None else "; ".join(record.reasons) or record.case


def replay_line(record: Record, trees: Trees) -> str:
    """The line that runs the record's case again."""
    law = f" --law {shlex.quote(record.law)}" if record.law else ""
    return f"mla-oracle replay {shlex.quote(record.case)} --impl {record.impl} --on {record.on}{law}{trees.words}"


@application.command()
def show(
    what: Annotated[str, typer.Argument(metavar="RUN|ID", help="A run directory, or a case id.")],
    where: Annotated[
        Path | None, typer.Option("--run", help="The run of the case; the newest in runs/ by default.")
    ] = None,
    impl: ImplOption = None,
    on: OnOption = None,
    status: Annotated[list[str] | None, typer.Option("--status", help="Only these; may be repeated.")] = None,
) -> None:
    """A run as a table and its records line by line, or the records of one case in full."""
    console = _console()
    wanted = {_one_of("--status", word, _STATUSES) for word in status or ()}
    executions = {_one_of("--on", word, EXECUTIONS) for word in on or ()}
    is_case = ":" in what and not _exists(what)
    case = parse(what) if is_case else None
    run = read_run((where or _newest_run()) if is_case else Path(what))
    records = [
        record
        for record in run.records.values()
        if (not wanted or record.status in wanted)
        and (not executions or record.on in executions)
        and (not impl or any(fnmatch.fnmatchcase(record.impl, name) for name in impl))
        and (case is None or record.case == case.id)
    ]
    if not run.records and run.open_tasks:
        raise Misuse(
            f"{run.path}: none of its {len(run.plan)} cases has a record; answer them with "
            f"mla-oracle sweep --resume {shlex.quote(str(run.path))}"
        )
    if not records:
        raise Misuse(
            f"{run.path}: holds no such record; it has {len(run.records)}, `mla-oracle show {run.path}` lists them"
        )
    if case is None:
        console.print(_table(records))
        for record in records:
            law = f" law {record.law}:" if record.law else ""
            console.print(escape(f"{record.status:11} {record.impl} {record.on}{law} {record.case}"))
            if record.status != "pass":
                console.print(escape(f"            {_first_sentence(record)}"))
        for note in run.notes:
            console.print(escape(note))
        if run.open_tasks:
            console.print(
                f"{len(run.open_tasks)} of {len(run.plan)} cases have no record: mla-oracle sweep --resume {run.path}"
            )
        return
    for record in records:
        _show_record(record, console, Trees.of(run.settings))


def _exists(text: str) -> bool:
    """Whether a path of this spelling exists; a case id may be longer than any name can be."""
    try:
        return Path(text).exists()
    except OSError:
        return False


def _newest_run() -> Path:
    found = sorted(
        (path for path in _RUNS.glob("*") if (path / "run.json").is_file()), key=lambda path: path.stat().st_mtime
    )
    if not found:
        raise Misuse(f"there is no run in {_RUNS}; name one with --run, or make one with mla-oracle sweep")
    return found[-1]


def _show_record(record: Record, console: Console, trees: Trees) -> None:
    used = record.environment
    law = f", law {record.law}" if record.law else ""
    console.print(escape(f"{record.case}\n{record.status} by {record.impl} on {record.on}{law}"), style="bold")
    for sentence in (*record.reasons, *map(str, record.checks), *record.diagnosis):
        console.print(escape(f"  {sentence}"))
    if record.precision is not None:
        console.print(escape(f"  declared: {record.precision}"))
    versions = {
        "torch": used.torch,
        "triton": used.triton,
        "vllm": used.vllm,
        "aiter": used.aiter,
        "commit": used.commit,
    }
    said = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    console.print(escape(f"  on {used.device}, {used.machine}, python {used.python}, {said}"))
    spent = record.seconds
    console.print(f"  {spent.build:.3f} s to build, {spent.run:.3f} s to run, {spent.judge:.3f} s to judge")
    if record.fingerprint:
        console.print(f"  outputs {record.fingerprint[:16]}, source {record.source[:16]}")
    console.print(escape(f"  see it again: {replay_line(record, trees)}"))


@application.command()
def replay(
    what: Annotated[str, typer.Argument(metavar="ID|CAPSULE", help="A case id, or a capsule file.")],
    impl: ImplOption = None,
    on: OnOption = None,
    law: Annotated[str, typer.Option("--law", help="Ask about this law of the op instead of the answer.")] = "",
    vllm: VllmOption = None,
    aiter: AiterOption = None,
    save: Annotated[Path | None, typer.Option("--save", help="Keep the trial as a capsule in this new file.")] = None,
) -> int:
    """Run one case again in this process, and explain it; a crash is a crash, and a hang hangs."""
    is_file = _exists(what) or (":" not in what and what.endswith(".safetensors"))
    before, inputs = read_capsule(Path(what)) if is_file else (None, None)
    case = parse(before.case if before is not None else what)
    executions = _executions(on) if on or before is None else _executions([before.on])
    names = chosen_impls((case.op,), tuple(impl or ((before.impl,) if before is not None else ())))
    asked = law or (before.law if before is not None else "")
    if asked and asked not in (named := [each.name for each in rooms.op_module("oracle", case.op).LAWS]):
        raise Misuse(f"--law {asked}: {case.op} has the laws {', '.join(named) or 'none'}")
    trees = _trees(vllm, aiter)
    if save is not None and (save.exists() or not save.resolve().parent.is_dir()):
        raise Misuse(f"--save {save}: should name a new file in a directory that exists")
    if save is not None and len(names) * len(executions) != 1:
        raise Misuse(f"--save {save}: needs one --impl and one --on, these are {len(names)} and {len(executions)}")
    console = _console()
    worst, judged = 0, False
    for execution in executions:
        if execution == "interpreter":
            # Read by Triton when a kernel is decorated, and nothing has imported it yet.
            os.environ["TRITON_INTERPRET"] = "1"
        for name in names:
            answerer = find_impl(case.op, name)
            here = environment(execution, trees.vllm, trees.aiter)
            trial = attempt(case, answerer, execution, here, inputs=inputs, law=asked)
            _show_record(trial.record, console, trees)
            if before is not None and before.fingerprint and (name, execution) == (before.impl, before.on):
                same = trial.record.fingerprint == before.fingerprint
                console.print(f"  its outputs are {'the same as' if same else 'not those'} in the capsule")
            if save is not None:
                console.print(f"  kept in {write_capsule(save, trial)}")
            broke = any(reason.startswith(HARNESS) for reason in trial.record.reasons)
            worst = max(worst, 3 if broke else 1 if trial.record.status in AGAINST else 0)
            judged |= trial.record.status != "unsupported"
    return worst if judged else max(worst, 1)


@application.command()
def doctor(vllm: VllmOption = None, aiter: AiterOption = None) -> int:
    """What this machine is, which executions and implementations can answer on it, and how right its interpreter is.

    1 when the corrected interpreter gets a row of its conformance table wrong.
    """
    trees = _trees(vllm, aiter)
    console = _console()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    here = environment(default_execution(), trees.vllm, trees.aiter)
    for field in here.__struct_fields__:
        console.print(escape(f"{field:8} {getattr(here, field) or 'none'}"))
    for on in EXECUTIONS:
        console.print(escape(f"--on {on}: {'; '.join(unavailable(on)) or 'available'}"))
    for op in rooms.OPS:
        case: Case = case_type(op)()
        for answerer in implementations(op):
            for on in EXECUTIONS:
                if on == "interpreter" or not unavailable(on):
                    try:
                        reasons = answerer.unsupported(case, on)
                    except SourceError as error:
                        reasons = [str(error)]
                    console.print(escape(f"{op} {answerer.name} --on {on}: {'; '.join(reasons) or 'can answer'}"))
    return _print_conformance(console)


def _print_conformance(console: Console) -> int:
    missing = importlib.import_module("impl.executions.interpreter").unsupported()
    if missing:
        console.print(escape(f"interpreter: {'; '.join(missing)}"))
        return 0
    table = Table("operation", "checked", "as shipped", "corrected", "note", box=None)
    rows: list[Any] = importlib.import_module("impl.executions.conformance").table()
    for row in rows:
        table.add_row(*(escape(str(text)) for text in (row.name, row.checks, row.stock, row.corrected, row.note)))
    console.print(table)
    shipped, corrected = (sum(getattr(row, column) == "right" for row in rows) for column in ("stock", "corrected"))
    console.print(f"of {len(rows)} rows, {shipped} are right as shipped and {corrected} corrected")
    return 0 if corrected == len(rows) else 1


@application.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    out: Annotated[Path | None, typer.Option("--out", help="Where the page goes; RUN/report.html by default.")] = None,
) -> None:
    """One HTML page about a run."""
    read_settings(run)
    page = out if out is not None else run / "report.html"
    if page.is_dir() or not page.resolve().parent.is_dir():
        raise Misuse(f"--out {page}: should name a file in a directory that exists")
    html = importlib.import_module("reports.html")
    if page.exists() and not html.is_report(page):
        raise Misuse(f"--out {page}: exists and is no report; it should be a new file or an earlier report")
    written = html.report_run(run, page)
    _console().print(str(written))


@application.command()
def prove(
    op: OpOption = None,
    level: LevelOption = "default",
    clean: Annotated[int, typer.Option("--clean", help="Right answers to judge, a hunt for false alarms.")] = 2000,
    depth: Annotated[int, typer.Option("--depth", help="Observable cases a wrong answer is looked at on.")] = 6,
    seed: SeedOption = 0,
    workers: WorkersOption = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Keep the proofs as JSON in this new file.")] = None,
) -> int:
    """The kill matrix, false alarms and tightness of an op: does its judge tell wrong answers from right ones?"""
    ops = chosen_ops(Selection(ops=tuple(op or ())))
    chosen: Level = _one_of("--cases", level, LEVELS)
    if clean < 0 or depth < 1:
        raise Misuse(f"--clean {clean} --depth {depth}: should be at least 0 and at least 1")
    if out is not None and out.exists():
        raise Misuse(f"--out {out}: exists already, it should be a new file")
    proving = importlib.import_module("reports.prove")
    code: int = proving.run(
        ops, level=chosen, clean=clean, depth=depth, seed=_not_negative("--seed", seed), workers=_workers(workers),
        out=out, console=_console(),
    )  # fmt: skip
    return code
