"""`mla-oracle doctor`: what can run here?"""

import importlib
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import cases as rooms
from cases.case import Case, case_type
from impl.implementation import EXECUTIONS, implementations, without_triton
from impl.sources.source_tree import SourceError
from reports.commands.shared import AiterOption, VllmOption, application, console_of, use_trees
from reports.environment import default_execution, environment, unavailable

IsaOption = Annotated[
    bool,
    typer.Option("--isa", help="Which AMD instructions are modelled, and what nobody can settle without hardware."),
]


@application.command()
def doctor(vllm: VllmOption = None, aiter: AiterOption = None, isa: IsaOption = False) -> int:
    """What this machine is, which executions and implementations can answer on it, and how right its interpreter is.

    1 when the corrected interpreter gets a row of its conformance table wrong.
    """
    if isa:
        return _print_machine(console_of())
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


def _print_machine(console: Console) -> int:
    """Which instructions the executor of machine code models, by unit, and what nobody can settle without hardware."""
    reasons = unavailable("isa:gfx950")
    if reasons:
        console.print(escape(f"isa: {'; '.join(reasons)}"))
        return 1
    coverage = importlib.import_module("impl.executions.isa.coverage")
    modelled: dict[str, frozenset[str]] = coverage.modelled()
    total = [sum(arch in archs for archs in modelled.values()) for arch in ("gfx942", "gfx950")]
    console.print(f"modelled: {total[0]} mnemonics of gfx942, {total[1]} of gfx950; any other one is refused by name")
    table = Table("instructions", "gfx942", "gfx950", "held against", "mnemonics", box=None)
    groups: dict[str, list[str]] = {}
    for name in modelled:
        groups.setdefault(_unit(name), []).append(name)
    for unit, names in groups.items():
        counts = [sum(arch in modelled[name] for name in names) for arch in ("gfx942", "gfx950")]
        table.add_row(unit, *map(str, counts), _HELD.get(unit, _MEMORY), escape(" ".join(names)))
    console.print(table)
    console.print("held against: by tests/executions/isa of a checkout, `nox -s isa`")
    console.print("what no test here can settle, and what is assumed:")
    for sentence in coverage.UNSETTLED:
        console.print(escape(f"* {sentence}"))
    return 0


_PSEUDOCODE, _MEMORY = "AMD's pseudocode", "AMD's guide on memory"
_HELD = {
    "matrix": "placement formulas, exact products",
    **dict.fromkeys(("vector", "vector comparisons", "conversions", "scalar"), _PSEUDOCODE),
}
_UNITS = {
    "v_mfma": "matrix", "v_cmp": "vector comparisons", "v_cvt": "conversions", "v_": "vector", "s_load": "scalar memory",
    "s_buffer": "scalar memory", "s_": "scalar", "ds_": "LDS",
}  # fmt: skip


def _unit(name: str) -> str:
    """The unit that executes an instruction; the first start that fits says which."""
    for start, unit in _UNITS.items():
        if name.startswith(start):
            return unit
    return name.partition("_")[0]


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
