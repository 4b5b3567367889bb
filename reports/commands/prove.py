"""`mla-oracle prove`: does an op's judge tell wrong answers from right ones?"""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cases.covering import LEVELS, Level
from impl.implementation import machine_code_of
from reports.commands.shared import (
    AiterOption,
    LevelOption,
    Misuse,
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
from reports.plan import Selection, chosen_ops
from reports.replaying import Trees


@application.command()
def prove(
    op: OpOption = None,
    level: LevelOption = "default",
    clean: Annotated[int, typer.Option("--clean", help="Right answers to judge, a hunt for false alarms.")] = 2000,
    depth: Annotated[int, typer.Option("--depth", help="Observable cases a wrong answer is looked at on.")] = 6,
    seed: SeedOption = 0,
    workers: WorkersOption = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Keep the proofs as JSON in this new file.")] = None,
    miscompiles: Annotated[
        int, typer.Option("--miscompiles", help="Instead: so many wrong instructions in the machine code of kernels.")
    ] = 0,
    on: Annotated[
        list[str] | None, typer.Option("--on", help="With --miscompiles: isa:gfx950 or isa:gfx942; may be repeated.")
    ] = None,
    vllm: VllmOption = None,
    aiter: AiterOption = None,
) -> int:
    """The kill matrix, false alarms and tightness of an op: does its judge tell wrong answers from right ones?"""
    ops = chosen_ops(Selection(ops=tuple(op or ())))
    chosen: Level = one_of("--cases", level, LEVELS)
    if miscompiles < 0:
        raise Misuse(f"--miscompiles {miscompiles}: should not be negative")
    if not miscompiles and (on or vllm or aiter):
        raise Misuse("--on, --vllm, --aiter: say whose machine code is edited, so they should stand with --miscompiles")
    if clean < 0 or depth < 1:
        raise Misuse(f"--clean {clean} --depth {depth}: should be at least 0 and at least 1")
    if out is not None and out.exists():
        raise Misuse(f"--out {out}: exists already, it should be a new file")
    if out is not None:
        _check_place(out)
    if miscompiles:
        return _prove_miscompiles(ops, miscompiles, on, chosen, seed_of(seed), workers, use_trees(vllm, aiter), out)
    proving = importlib.import_module("reports.prove")
    code: int = proving.run(
        ops, level=chosen, clean=clean, depth=depth, seed=seed_of(seed), workers=workers_of(workers),
        out=out, console=console_of(),
    )  # fmt: skip
    return code


def _prove_miscompiles(
    ops: Sequence[str], count: int, on: list[str] | None, level: Level, seed: int, workers: int, trees: Trees,
    out: Path | None,
) -> int:  # fmt: skip
    executions = executions_of(on or ["isa:gfx950"])
    for execution in executions:
        if not machine_code_of(execution):
            raise Misuse(f"--on {execution}: runs no machine code; it should be isa:gfx950 or isa:gfx942")
    code: int = importlib.import_module("reports.miscompiles").run(
        ops, executions, count, seed=seed, level=level, trees=trees, workers=workers_of(workers), out=out, console=console_of()
    )  # fmt: skip
    return code


def _check_place(out: Path) -> None:
    """Raise where the file could not be made after all the proving; directories above it are made."""
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise Misuse(f"--out {out}: should name a new file below a directory that can be written, {above} is none")
