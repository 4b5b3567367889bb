"""What do the subcommands have in common: their options, and how each says that it was asked for the impossible?"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import typer
from rich.console import Console

from impl.implementation import EXECUTIONS, Execution, on_device
from impl.sources import aiter as aiter_source
from impl.sources import vllm as vllm_source
from impl.sources.settings import use_aiter, use_vllm
from impl.sources.source_tree import SourceError
from oracle.check import Status
from reports.environment import default_execution, unavailable
from reports.judge import version
from reports.replaying import Trees

W = TypeVar("W", bound=str)

RUNS = Path("runs")
_DEVICE_WORKERS = 8
_LARGEST_SEED = 10**9
STATUSES: tuple[Status, ...] = get_args(Status)

application = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False,
)  # fmt: skip


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"mla-oracle {version()}")
        raise typer.Exit


@application.callback()
def options(
    is_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Say which version this is, and nothing else."
        ),
    ] = False,
) -> None:
    """Is this kernel right, everywhere it claims to be, and what changed since yesterday?"""


OpOption = Annotated[list[str] | None, typer.Option("--op", help="An op or a family; may be repeated.")]
ImplOption = Annotated[
    list[str] | None, typer.Option("--impl", help="An implementation, or vllm-* for several; may be repeated.")
]
OnOption = Annotated[
    list[str] | None, typer.Option("--on", help=f"Where they run: {', '.join(EXECUTIONS)}; may be repeated.")
]
LevelOption = Annotated[str, typer.Option("--cases", help="How much is asked: smoke, default or nightly.")]
CaseOption = Annotated[
    list[str] | None, typer.Option("--case", help="A case id, or axis=value|value,...; may be repeated.")
]
VllmOption = Annotated[Path | None, typer.Option("--vllm", help="A vLLM checkout, installation or unpacked wheel.")]
AiterOption = Annotated[Path | None, typer.Option("--aiter", help="An AITER checkout, installation or unpacked wheel.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Moves the seed of every case.")]
WorkersOption = Annotated[int, typer.Option("--workers", help="Worker processes; 0 for one per processor.")]


class Misuse(Exception):
    """What the user asked for cannot be; the message says what would be right."""


def console_of() -> Console:
    """The terminal; a pipe is as wide as it needs to be."""
    console = Console(highlight=False, soft_wrap=True)
    # A pipe has no width: nothing is cut off there.
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=200)


def one_of(option: str, word: str, allowed: Iterable[W]) -> W:
    """The allowed word that was given, or `Misuse` naming them all."""
    for known in allowed:
        if word == known:
            return known
    raise Misuse(f"{option} {word}: should be one of {', '.join(allowed)}")


def executions_of(words: Sequence[str] | None) -> tuple[Execution, ...]:
    """The executions of `--on`, this machine's own without one; `Misuse` for what it does not have."""
    chosen = tuple(dict.fromkeys(one_of("--on", word, EXECUTIONS) for word in words or ()))
    for on in chosen:
        reasons = unavailable(on)
        if on != "interpreter" and reasons:
            raise Misuse(f"--on {on}: {'; '.join(reasons)}")
    return chosen or (default_execution(),)


def use_trees(vllm: Path | None, aiter: Path | None) -> Trees:
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


def workers_of(asked: int, executions: Sequence[Execution] = ()) -> int:
    """How many workers `--workers` means: for 0 one per processor, fewer on a device."""
    if asked < 0:
        raise Misuse(f"--workers {asked}: should be 1 or more, or 0 for one per processor")
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Every worker on a device holds a context there, half a gigabyte and more.
    return asked or (processors if not any(map(on_device, executions)) else min(processors, _DEVICE_WORKERS))


def not_negative(option: str, number: int) -> int:
    """The number, or `Misuse`."""
    if number < 0:
        raise Misuse(f"{option} {number}: should not be negative")
    return number


def seed_of(number: int) -> int:
    """The seed of `--seed`, or `Misuse`; a case id spells what is made of it in 18 digits at most."""
    if not_negative("--seed", number) >= _LARGEST_SEED:
        raise Misuse(f"--seed {number}: should have {len(str(_LARGEST_SEED)) - 1} digits at most")
    return number


def exists(text: str) -> bool:
    """Whether a path of this spelling exists; a case id may be longer than any name can be."""
    try:
        return Path(text).exists()
    except OSError:
        return False
