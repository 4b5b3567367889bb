"""`mla-oracle replay`: what happens in one case?"""

import os
from pathlib import Path
from typing import Annotated

import typer
from safetensors import SafetensorError

import cases as rooms
from cases.case import parse
from reports.capsule import read_capsule, write_capsule
from reports.commands.shared import (
    AiterOption,
    ImplOption,
    Misuse,
    OnOption,
    VllmOption,
    application,
    console_of,
    executions_of,
    exists,
    use_trees,
)  # fmt: skip
from reports.commands.terminal import show_record
from reports.environment import environment
from reports.execute import HARNESS, attempt
from reports.plan import AGAINST, chosen_impls, find_impl


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
    is_file = exists(what) or (":" not in what and what.endswith(".safetensors"))
    before, inputs = read_capsule(Path(what)) if is_file else (None, None)
    case = parse(before.case if before is not None else what)
    executions = executions_of(on) if on or before is None else executions_of([before.on])
    names = chosen_impls((case.op,), tuple(impl or ((before.impl,) if before is not None else ())))
    asked = law or (before.law if before is not None else "")
    if asked and asked not in (named := [each.name for each in rooms.op_module("oracle", case.op).LAWS]):
        raise Misuse(f"--law {asked}: {case.op} has the laws {', '.join(named) or 'none'}")
    trees = use_trees(vllm, aiter)
    if save is not None and (save.exists() or not save.resolve().parent.is_dir()):
        raise Misuse(f"--save {save}: should name a new file in a directory that exists")
    if save is not None and len(names) * len(executions) != 1:
        raise Misuse(f"--save {save}: needs one --impl and one --on, these are {len(names)} and {len(executions)}")
    console = console_of()
    worst, judged = 0, False
    for execution in executions:
        if execution == "interpreter":
            # Read by Triton when a kernel is decorated, and nothing has imported it yet.
            os.environ["TRITON_INTERPRET"] = "1"
        for name in names:
            answerer = find_impl(case.op, name)
            here = environment(execution, trees.vllm, trees.aiter)
            trial = attempt(case, answerer, execution, here, inputs=inputs, law=asked)
            show_record(trial.record, console, trees)
            if before is not None and before.fingerprint and (name, execution) == (before.impl, before.on):
                same = trial.record.fingerprint == before.fingerprint
                console.print(f"  its outputs are {'the same as' if same else 'not those'} in the capsule")
            if save is not None:
                try:
                    console.print(f"  kept in {write_capsule(save, trial)}")
                except (OSError, SafetensorError) as error:
                    raise Misuse(f"--save {save}: {error}; it should be a place with room to write") from error
            broke = any(reason.startswith(HARNESS) for reason in trial.record.reasons)
            worst = max(worst, 3 if broke else 1 if trial.record.status in AGAINST else 0)
            judged |= trial.record.status != "unsupported"
    return worst if judged else max(worst, 1)
