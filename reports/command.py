"""What does a user type, and is this the house that they mean?

The names cases, oracle, impl and reports are common: before anything else is imported, all four must come from the
directory that holds this file.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

_ROOMS = ("cases", "oracle", "impl", "reports")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 for findings, 2 for misuse, 3 when the harness itself broke."""
    stranger = intruder()
    if stranger is not None:
        sys.stderr.write(f"mla-oracle: {stranger}\n")
        return 2
    try:
        code: int = importlib.import_module("reports.commands").run(
            list(sys.argv[1:] if arguments is None else arguments)
        )
    except KeyboardInterrupt:
        # Importing takes seconds, and `run` itself is not there yet to say it.
        sys.stderr.write("mla-oracle: interrupted\n")
        return 130
    return code


def intruder() -> str | None:
    """The sentence about a room that comes from elsewhere; None when all four come from one parent directory."""
    house = Path(__file__).resolve().parent.parent
    for room in _ROOMS:
        spec = importlib.util.find_spec(room)
        origin = spec.origin if spec is not None else None
        if spec is None:
            return f"the package {room!r} is missing, it should lie in {house}"
        found = Path(origin).resolve().parent if origin else Path(next(iter(spec.submodule_search_locations or [""])))
        if found != house / room:
            return (
                f"the package {room!r} comes from {found}, but should come from {house / room}; "
                "another project of that name stands in front of it on sys.path"
            )
    return None


if __name__ == "__main__":
    raise SystemExit(main())
