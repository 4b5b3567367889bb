"""Do the house's packages and a user's of the same names both work in one process, each side seeing its own?"""

import subprocess
import sys
from pathlib import Path

import pytest

HOUSE_FILE = Path(__file__).parents[2] / "reports" / "house.py"

PROLOGUE = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("by_file", {str(HOUSE_FILE)!r})
house = importlib.util.module_from_spec(spec)
spec.loader.exec_module(house)
from pathlib import Path
sides = house.sides_of(Path("house").resolve())
"""


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A directory with a house of four rooms and a user's project that has two of the names."""
    for room in ("cases", "oracle", "impl", "reports"):
        (tmp_path / "house" / room).mkdir(parents=True)
        (tmp_path / "house" / room / "__init__.py").write_text("WHOSE = 'house'\n")
        (tmp_path / "house" / room / "deep.py").write_text("WHOSE = 'house'\n")
    (tmp_path / "house" / "cases" / "lazy.py").write_text(
        "def find():\n    import reports.deep as d\n    return d.WHOSE\n"
    )
    for name in ("cases", "reports"):
        (tmp_path / "user" / name).mkdir(parents=True)
        (tmp_path / "user" / name / "__init__.py").write_text("WHOSE = 'user'\n")
        (tmp_path / "user" / name / "mine.py").write_text("WHOSE = 'user'\n")
    return tmp_path


def run(place: Path, *path: str, script: str) -> None:
    begin = f"import sys\nsys.path[:0] = {[str(place / part) for part in path]!r}\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", begin + PROLOGUE + script],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_each_side_sees_its_own_whenever_it_imports(two: Path) -> None:
    run(
        two, "user", "house",
        script="""
import cases
assert cases.WHOSE == "user"
before = list(sys.path)
with sides.inside():
    import cases as ours, reports.deep
    from cases.lazy import find
    assert ours.WHOSE == reports.WHOSE == "house"
    with sides.outside():
        import cases, reports, reports.mine
        assert cases.WHOSE == reports.WHOSE == "user"
        try:
            import reports.deep
        except ModuleNotFoundError:
            pass
        else:
            raise SystemExit("the user's package has no such module")
    import reports
    assert reports.WHOSE == "house" and find() == "house"
    try:
        import reports.mine
    except ModuleNotFoundError:
        pass
    else:
        raise SystemExit("the house has no such module")
import cases, reports, reports.mine
assert cases.WHOSE == reports.WHOSE == "user"
assert sys.path == before
with sides.inside():
    import cases as again
    assert again is ours
""",
    )  # fmt: skip


def test_what_nothing_shadows_is_loaded_once_for_both_sides(two: Path) -> None:
    run(
        two, "house",
        script="""
import cases
with sides.inside():
    import cases as ours, impl.deep, oracle
    deep, loader = sys.modules["impl.deep"], oracle.__spec__.loader
assert cases is ours
import importlib
assert importlib.import_module("oracle") is oracle
assert importlib.import_module("impl.deep") is deep
assert oracle.__spec__.loader is loader and importlib.util.find_spec("cases.deep").origin.endswith("deep.py")
import reports.deep
with sides.inside():
    assert importlib.import_module("reports.deep") is reports.deep
""",
    )  # fmt: skip


def test_a_room_is_shared_though_another_is_shadowed(two: Path) -> None:
    (two / "user" / "cases" / "__init__.py").unlink()
    (two / "user" / "cases" / "mine.py").unlink()
    run(
        two, "user", "house",
        script="""
with sides.inside():
    import cases.deep as deep, reports
    assert reports.WHOSE == "house"
    with sides.outside():
        same = importlib.import_module("cases.deep")
        import reports
        assert same is deep and reports.WHOSE == "user"
""",
    )  # fmt: skip


def test_the_users_names_come_back_after_whatever_was_raised(two: Path) -> None:
    run(
        two, "user", "house",
        script="""
import reports
for error in (ValueError, KeyboardInterrupt, SystemExit):
    try:
        with sides.inside():
            try:
                with sides.outside():
                    assert sys.modules["reports"] is reports
                    raise error
            finally:
                import reports as ours
                assert ours.WHOSE == "house"
    except error:
        pass
    assert sys.modules["reports"] is reports
""",
    )  # fmt: skip


def test_nested_sides_and_a_name_that_is_nowhere_else(two: Path) -> None:
    run(
        two, "user",
        script="""
with sides.outside(), sides.inside(), sides.inside():
    import impl
    with sides.outside():
        assert "impl" not in sys.modules
        with sides.inside():
            assert sys.modules["impl"] is impl
        try:
            import impl
        except ModuleNotFoundError:
            pass
        else:
            raise SystemExit("the user has no such package")
    assert sys.modules["impl"].WHOSE == "house"
assert "impl" not in sys.modules
""",
    )  # fmt: skip


def test_there_is_one_pair_of_sides_however_often_the_file_is_loaded(two: Path) -> None:
    run(
        two, "user", "house",
        script="""
other = importlib.util.module_from_spec(spec)
spec.loader.exec_module(other)
assert other.sides_of(Path("house").resolve()) is sides
assert sum(type(finder).__name__ == "Sides" for finder in sys.meta_path) == 1
""",
    )  # fmt: skip
