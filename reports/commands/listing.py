"""`mla-oracle list`: what can be asked, and who answers?"""

import cases as rooms
from cases.case import case_type
from cases.covering import LEVELS, sweep_cases
from impl.implementation import implementations
from reports.commands.shared import LevelOption, OpOption, application, console_of, one_of
from reports.plan import Selection, chosen_ops


@application.command("list")
def list_ops(op: OpOption = None, level: LevelOption = "default") -> None:
    """Ops, their axes, how many cases are asked, and who answers."""
    chosen = one_of("--cases", level, LEVELS)
    console = console_of()
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
