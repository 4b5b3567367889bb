"""Which installation do these tests use? A wheel of this tree in a fresh environment, beside the host's torch and pytest."""

import dataclasses
import os
import subprocess
import sys
import sysconfig
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
# pip's own script for a console entry point, which leaves the directory that the user stands in off sys.path.
_PYTEST = """#!{python}
import sys
from pytest import console_main
sys.exit(console_main())
"""


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a pytest run printed, its exit code, and each test's message; empty for those that passed."""

    code: int
    said: str
    messages: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Installed:
    """A virtual environment that has mla-oracle."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    def run(self, place: Path, *command: str) -> subprocess.CompletedProcess[str]:
        """A command of the environment, run in a directory, with nothing of this test session's settings."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON", "PYTHON"))
        }
        first = self.root / "bin" / command[0]
        return subprocess.run(
            [str(first), *command[1:]], cwd=place, capture_output=True, text=True, check=False,
            env={**kept, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def pytest(self, place: Path, *arguments: str, begin: tuple[str, ...] = ("pytest",)) -> Ran:
        """One pytest session of a user's."""
        report = place / "report.xml"
        report.unlink(missing_ok=True)
        done = self.run(place, *begin, "-q", "--tb=long", f"--junitxml={report}", *arguments)
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        messages = {}
        for case in cases:
            wrong = [*case.findall("failure"), *case.findall("error")]
            messages[case.get("name", "")] = "\n".join(each.text or "" for each in wrong)
        return Ran(done.returncode, done.stdout + done.stderr, messages)


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Installed]:
    """Makes an environment and gives pip what it shall install there, offline and without dependencies."""

    def made(*what: str) -> Installed:
        root = tmp_path_factory.mktemp("environment")
        venv.create(root, with_pip=False, symlinks=True)
        found = Installed(root)
        purelib = root / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        # torch, triton and pytest are the host's; what this session itself has linked too.
        host = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (purelib / "host.pth").write_text("\n".join(host) + "\n")
        script = root / "bin" / "pytest"
        script.write_text(_PYTEST.format(python=found.python))
        script.chmod(0o755)
        command = [
            sys.executable, "-m", "pip", "--python", str(found.python), "install", "--quiet", "--no-deps", "--no-index",
            "--no-build-isolation", "--ignore-installed", "--disable-pip-version-check", *what,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return found

    return made


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def installed(fresh: Callable[..., Installed], wheel: Path) -> Installed:
    """An environment with the wheel."""
    return fresh(str(wheel))
