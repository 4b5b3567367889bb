"""`mla-oracle doctor`: what can run here?"""

import importlib
import os
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import cases as rooms
from cases.case import Case, case_type
from impl.implementation import EXECUTIONS, implementations, without_triton
from impl.sources.source_tree import SourceError
from reports.commands.shared import AiterOption, VllmOption, application, console_of, use_trees
from reports.environment import default_execution, environment, unavailable


@application.command()
def doctor(vllm: VllmOption = None, aiter: AiterOption = None) -> int:
    """What this machine is, which executions and implementations can answer on it, and how right its interpreter is.

    1 when the corrected interpreter gets a row of its conformance table wrong.
    """
    trees = use_trees(vllm, aiter)
    console = console_of()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    missing = without_triton()
    if missing:
        console.print(escape(f"No Triton kernel can be judged here: {'; '.join(missing)}."), style="bold")
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
