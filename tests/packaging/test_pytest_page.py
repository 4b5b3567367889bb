"""Do the examples of docs/pytest.md run as they stand, and does a failure read as the page says?"""

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.packaging
PAGE = (Path(__file__).parents[2] / "docs" / "pytest.md").read_text()


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A directory with the files that the page shows."""
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        name = code.partition("\n")[0].removeprefix("# ")
        (tmp_path / name).write_text(code)
    return tmp_path


def test_the_examples_pass_and_a_failure_reads_as_shown(installed: Any, examples: Path) -> None:
    code = (examples / "test_ragged.py").read_text()
    left_out = " & (indices >= 0)"
    assert f"Without `{left_out.strip()}`" in PAGE
    (examples / "test_broken.py").write_text(code.replace(left_out, "").replace("test_pack", "test_broken"))
    ran = installed.pytest(examples, "--oracle-on", "interpreter")
    said = ran.messages.pop("test_broken")
    assert ran.messages == {"test_pack": "", "test_powers_of_two": ""}
    shown = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    for line in shown[1].splitlines():
        assert line.removesuffix("...").partition("again:")[0] in said


def test_the_script_runs(installed: Any, examples: Path) -> None:
    done = installed.run(examples, "python", "ask.py")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ answers\nfail\n", done.stdout)


def test_every_keyword_is_on_the_page() -> None:
    from reports.foreign_cases import How

    for keyword in How.__dataclass_fields__:
        assert f"`{keyword}=" in PAGE
