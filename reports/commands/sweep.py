"""`mla-oracle sweep`: who answers what rightly?"""

import shlex
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from cases.covering import LEVELS
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
    not_negative,
    one_of,
    seed_of,
    use_trees,
    workers_of,
)  # fmt: skip
from reports.commands.terminal import asked_again, first_sentence, table_of
from reports.judge import judge
from reports.kernels import no_kernel_judged
from reports.plan import AGAINST, Plan, Selection, plan
from reports.record import Record
from reports.replaying import Trees, replay_line
from reports.shards import Shard, part_of, shard_of, whole_of
from reports.store import Run, Settings, check_vacant, create_run, read_run, read_settings
from reports.sweep import exit_code, sweep
from reports.words import has, plural

_LISTED_GROUPS = 20
_DEADLINE = 300.0
_CAPSULES = 1


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
    capsules: Annotated[
        int, typer.Option("--capsules", help="Failures of each kind that a worker keeps as capsules; 0 for none.")
    ] = _CAPSULES,
    retry: Annotated[
        bool,
        typer.Option("--retry", help="Ask once more what ended as a crash, a hang or a lost device; never an answer."),
    ] = False,
    shard: Annotated[
        str | None, typer.Option("--shard", help="Only the i-th of n parts of the plan, as i/n; `merge` joins them.")
    ] = None,
    balance: Annotated[
        Path | None,
        typer.Option("--balance", help="The run by whose times shards are divided; the same for all of them."),
    ] = None,
    vllm: VllmOption = None,
    aiter: AiterOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="A new run directory; runs/<time> by default.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Finish this run; takes nothing but it.")] = None,
    allow_unjudged: Annotated[
        bool, typer.Option("--allow-unjudged", help="0 even if nothing could be judged.")
    ] = False,
) -> int:
    """Ask implementations the cases of ops, and keep a record of every answer."""
    console = console_of()
    if resume is not None:
        chosen = any((op, impl, on, case, failed, laws, retry, balance, vllm, aiter, out, seed, workers))
        if chosen or shard is not None or level != "default" or deadline != _DEADLINE or capsules != _CAPSULES:
            raise Misuse(f"--resume {resume}: the run's own settings hold, no selection, tree or --out may be given")
        read_settings(resume)
        path = resume
    else:
        wanted = Selection(
            ops=tuple(op or ()), impls=tuple(impl or ()), on=executions_of(on),
            level=one_of("--cases", level, LEVELS), patterns=tuple(case or ()), failed=failed,
            seed=seed_of(seed), laws=laws,
        )  # fmt: skip
        part = _part(shard, balance)
        settings = Settings(
            workers=workers_of(workers, wanted.on), deadline=deadline, capsules=not_negative("--capsules", capsules),
            retry=retry, shard=str(part or ""), balance=str(balance or ""),
        )  # fmt: skip
        path = _new_run(wanted, use_trees(vllm, aiter), settings, out, console)
    try:
        done = sweep(path, console)
    except KeyboardInterrupt:
        typer.echo(
            f"mla-oracle: interrupted; continue with: mla-oracle sweep --resume {shlex.quote(str(path))}", err=True
        )
        return 130
    _summarise(done, console)
    return exit_code(done, allow_unjudged)


def _part(shard: str | None, balance: Path | None) -> Shard | None:
    """The shard that `--shard` names, if it does."""
    if shard is None and balance is not None:
        raise Misuse(f"--balance {balance}: divides the plan among shards, so it should stand with --shard i/n")
    return None if shard is None else shard_of(shard)


def _new_run(wanted: Selection, trees: Trees, how: Settings, out: Path | None, console: Console) -> Path:
    """Plan, then create the run directory: nothing is written before everything that was asked for exists."""
    if not 0 < how.deadline < 1e6:
        raise Misuse(f"--deadline {how.deadline:g}: should be more than 0 seconds, and less than a million")
    if wanted.laws and wanted.failed is not None:
        raise Misuse("--laws --failed: what failed is asked again, laws among it; no others can be chosen")
    times = read_run(Path(how.balance)) if how.balance else None
    path = out if out is not None else RUNS / time.strftime("%Y%m%d-%H%M%S")
    check_vacant(path)
    found = plan(wanted)
    settings = msgspec.structs.replace(
        how, created=time.time(), ops=wanted.ops, impls=wanted.impls, on=wanted.on, cases=wanted.level,
        patterns=wanted.patterns, failed=str(wanted.failed or ""), seed=wanted.seed,
        vllm=str(trees.vllm or ""), aiter=str(trees.aiter or ""), laws=wanted.laws, ledgers=found.ledgers,
        whole=whole_of(found.tasks) if how.shard else "", judge=judge(),
    )  # fmt: skip
    about_shard = ""
    if how.shard:
        found, about_shard = _divided(found, shard_of(how.shard), times)
    create_run(path, settings, found.tasks)
    about_laws = sum(bool(task.law) for task in found.tasks)
    answers = plural(len(found.tasks) - about_laws, "answer")
    laws = f" and {plural(about_laws, 'answer')} about laws" if about_laws else ""
    asked = plural(len({task.case for task in found.tasks}), "case")
    console.print(f"{path}: {answers} to {asked}{laws} on {', '.join(wanted.on)}")
    if about_shard:
        console.print(about_shard)
    for ledger in found.ledgers:
        console.print(f"  {ledger}")
    return path


def _divided(whole: Plan, shard: Shard, times: Run | None) -> tuple[Plan, str]:
    """The shard's part of a plan, with the coverage of the whole, and a sentence on how they compare."""
    part = part_of(whole.tasks, shard, times)
    told = f"  shard {shard}: {len(part.tasks)} of {plural(len(whole.tasks), 'answer')}"
    if times is not None:
        told += (
            f", about {part.seconds:.3g} of {part.whole_seconds:.3g} s ({part.known} with a time of their own); the longest "
            f"shard has {part.imbalance:.1%} more than the mean"
        )
    return Plan(part.tasks, whole.ledgers), told


def _summarise(run: Run, console: Console) -> None:
    records = list(run.records.values())
    unjudged = no_kernel_judged(records)
    if unjudged:
        console.print(escape(unjudged), style="bold")
    console.print(table_of(records))
    groups: dict[tuple[str, str, str, str], list[Record]] = {}
    for record in records:
        if record.status in AGAINST:
            asked = f"{record.op} laws" if record.law else record.op
            groups.setdefault((asked, record.impl, record.on, record.status), []).append(record)
    for (op, impl, on, status), found in list(groups.items())[:_LISTED_GROUPS]:
        worst = max(found, key=lambda record: record.use)
        console.print(escape(f"{op} {impl} {on}: {len(found)} {status}, such as: {first_sentence(worst)}"))
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
        more = f", and {plural(len(reasons) - 1, 'other reason')}" if len(reasons) > 1 else ""
        asked = plural(sum(reasons.values()), "time")
        console.print(escape(f"{impl} on {on} did not answer {asked}: {reason} ({times}){more}"))
    if records and all(record.status == "unsupported" for record in records):
        console.print("nothing was judged, so this is no pass; --allow-unjudged accepts it", style="bold")
    for sentence in (*asked_again(records), *run.notes):
        console.print(escape(sentence))
    lost = len(run.open_tasks)
    if lost:
        console.print(
            f"{plural(lost, 'case')} {has(lost)} no record: the sessions ended without {'it' if lost == 1 else 'them'}, "
            f"see {run.path / 'logs'}",
            style="bold",
        )
