"""What does a user's own pytest get from this house? The fixture `oracle_check`, and the options that go with it.

An installation has this file as the top-level module `mla_oracle_pytest`: the names of the rooms may mean other packages
in the user's project. It imports nothing of the house by name before the house is in front.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_EXECUTIONS = ("interpreter", "cuda", "hip")
_ASKED = "oracle_check"
# Files by which the house is told from a project that has packages of the same names.
_OF_THE_HOUSE = ("reports/house.py", "reports/foreign_cases.py", "oracle/check.py", "cases/covering.py")


def _house() -> Path:
    """The directory of the four rooms: round this file, or one of those that Python imports from."""
    here = Path(__file__).resolve().parent
    for folder in (here, here.parent, *map(Path, sys.path)):
        if all((folder / file).is_file() for file in _OF_THE_HOUSE):
            return folder.resolve()
    raise ImportError(f"{__file__}: the packages cases, oracle, impl and reports of mla-oracle are not installed")


HOUSE = _house()


def _sides() -> Any:
    """The `reports.house.Sides` of this process, by way of that file: the name may mean another package."""
    name = "mla_oracle_house"
    found = sys.modules.get(name)
    if found is None:
        spec = importlib.util.spec_from_file_location(name, HOUSE / "reports" / "house.py")
        assert spec is not None
        assert spec.loader is not None
        found = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return found.sides_of(HOUSE)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--oracle-on`, `--oracle-case`, and the ini value `oracle_on`."""
    group = parser.getgroup("mla-oracle", "mla-oracle: the fixture oracle_check")
    group.addoption(
        "--oracle-on", choices=_EXECUTIONS, help="where the functions run: interpreter decorates Triton kernels for it"
    )
    group.addoption(
        "--oracle-case", action="append", metavar="ID", help="ask this case only, whatever is selected; may be repeated"
    )
    parser.addini("oracle_on", "where the functions of oracle_check run: interpreter, cuda or hip", default="")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Triton decides when a kernel is decorated: before any module of the user's is imported."""
    asked = early_config.known_args_namespace
    on = getattr(asked, "oracle_on", None) or early_config.getini("oracle_on")
    if on and on not in _EXECUTIONS:
        raise pytest.UsageError(f"oracle_on = {on}: should be one of {', '.join(_EXECUTIONS)}")
    if on != "interpreter":
        return
    os.environ["TRITON_INTERPRET"] = "1"
    library = sys.modules.get("triton.language.standard")
    if library is not None and type(library.cdiv).__name__ != "InterpretedFunction":
        raise pytest.UsageError(
            "--oracle-on interpreter: a plugin imported triton before, so that its kernels are compiled; "
            "TRITON_INTERPRET=1 should be in the environment before pytest starts"
        )


def pytest_configure(config: pytest.Config) -> None:
    """A case that is asked for by its id must be asked by somebody."""
    if config.getoption("oracle_case") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Listener(config), "mla-oracle-listener")


class _Listener:
    """Hears whether any test has asked the cases of `--oracle-case`."""

    def __init__(self, config: pytest.Config) -> None:
        self._ids: list[str] = config.getoption("oracle_case")
        self._asked = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._asked |= any(name == _ASKED for name, _ in report.user_properties)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._asked and session.exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._asked:
            terminalreporter.write_line(f"--oracle-case: no test asked a case of {self._ids[0].partition(':')[0]}")


class CheckFailed(pytest.fail.Exception):  # type: ignore[name-defined, misc]
    """How `oracle_check` fails a test; `records` holds all answers, none where nothing could be asked."""

    # As pytest does with its own: the summary shall not spell out a module.
    __module__ = "builtins"

    def __init__(self, message: str, records: tuple[Any, ...]) -> None:
        super().__init__(message, pytrace=False)
        self.records = records


@pytest.fixture
def oracle_check(request: pytest.FixtureRequest) -> Callable[..., tuple[Any, ...]]:
    """A function that asks your kernel the sweep's cases of an op, and fails the test with what is wrong.

        def test_decode(oracle_check):
            oracle_check("sparse_mla.decode", my_kernel)

    It takes what `reports.check` takes, and returns the records; the failure that it raises has them too, as `records`.
    """
    only = tuple(request.config.getoption("oracle_case") or ())
    here = request.config.getoption("oracle_on") or request.config.getini("oracle_on") or None

    def check(op: str, function: Callable[[Any], Any], **how: Any) -> tuple[Any, ...]:
        __tracebackhide__ = True
        how["on"] = how.get("on") or here
        sides = _sides()
        with sides.inside():
            cases = importlib.import_module("reports.foreign_cases")
            answer = cases.answer(op, function, how, _again(request, here), only, sides.outside)
        if answer.misuse:
            raise CheckFailed(f"oracle_check: {answer.misuse}", ())
        records: tuple[Any, ...] = answer.records
        if records:
            request.node.user_properties.append((_ASKED, f"{op}: {len(records)} cases"))
        if answer.message:
            raise CheckFailed(answer.message, records)
        return records

    return check


def _again(request: pytest.FixtureRequest, on: str | None) -> Callable[[str, str], str]:
    """What writes the line that asks one case again: this test, from where pytest was started."""
    file, colons, test = request.node.nodeid.partition("::")
    started = request.config.invocation_params.dir
    nodeid = os.path.relpath(request.config.rootpath / file, started) + colons + test
    options = f" --oracle-on {on}" if on else ""
    return lambda case, name: f"pytest {shlex.quote(nodeid)}{options} --oracle-case {shlex.quote(case)}"
