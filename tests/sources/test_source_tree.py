"""Does the loader run what a name needs, and nothing else, of a package that is never imported?"""

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from impl.sources.source_tree import MissingNameError, Refusal, SourceError, SourceTree, Substitute, TreeLoader

Load = Callable[..., TreeLoader]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Writes a package `pack` of the given modules and returns a loader for it."""

    def write_and_load(
        files: dict[str, str], substitutes: dict[str, Substitute] | None = None, drop_guards: bool = False
    ) -> TreeLoader:
        for name, text in {"__init__.py": "", **files}.items():
            path = tmp_path / "pack" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        label = f"test_source_tree.{tmp_path.name}"
        return TreeLoader(SourceTree(tmp_path, "pack"), label, substitutes or {}, drop_guards)

    return write_and_load


def test_nothing_else_of_a_module_runs(load: Load) -> None:
    loader = load(
        {
            "__init__.py": "raise RuntimeError('the package was imported')\n",
            "a.py": "import no_such_package\nSIX = 6\ndef f(x):\n    return x * SIX\n1 / 0\nOTHER = undefined_name\n",
        }
    )
    assert loader.symbol("pack.a", "f")(7) == 42
    assert "pack" not in sys.modules
    assert loader.loaded_modules == ["pack.a"]


def test_names_are_followed_across_modules(load: Load) -> None:
    loader = load(
        {
            "a.py": "from pack.sub.b import g as h\nfrom .sub import b\nimport pack.sub.c as c\nfrom pack import d\n"
            "def f():\n    return h() + b.ONE + c.TEN + d.HUNDRED\n",
            "sub/__init__.py": "raise RuntimeError\n",
            "sub/b.py": "from ..d import HUNDRED\nONE = 1\ndef g():\n    return HUNDRED * 10\n",
            "sub/c.py": "TEN = 10\n",
            "d.py": "HUNDRED = 100\n",
        }
    )
    assert loader.symbol("pack.a", "f")() == 1111


def test_imports_inside_functions_stay_in_the_tree(load: Load) -> None:
    loader = load(
        {
            "a.py": "def f():\n    import pack.b\n    from pack.b import g\n    import math\n"
            "    return g() + pack.b.g() + math.floor(0.5)\n",
            "b.py": "def g():\n    return 3\n",
        }
    )
    assert loader.symbol("pack.a", "f")() == 6
    assert "pack" not in sys.modules


def test_a_directory_without_init_is_a_package(load: Load) -> None:
    loader = load({"a.py": "from pack.bare import b\ndef f():\n    return b.X\n", "bare/b.py": "X = 5\n"})
    assert loader.symbol("pack.a", "f")() == 5


def test_functions_may_need_one_another(load: Load) -> None:
    loader = load(
        {
            "a.py": "from pack.b import odd\ndef even(n):\n    return n == 0 or odd(n - 1)\n",
            "b.py": "from pack.a import even\ndef odd(n):\n    return n != 0 and even(n - 1)\n",
        }
    )
    assert loader.symbol("pack.a", "even")(10) is True


def test_a_value_that_needs_itself_is_an_error(load: Load) -> None:
    loader = load({"a.py": "A = B + 1\nB = A + 1\n"})
    with pytest.raises(SourceError, match=r"a\.py:\d raised NameError when it was executed"):
        loader.symbol("pack.a", "A")


def test_later_statements_of_a_name_run_too(load: Load) -> None:
    loader = load({"a.py": "T = {1: 1}\nT[2] = 4\nT.update({3: 9})\nfor i in (4,):\n    T[i] = i * i\nT |= {5: 25}\n"})
    assert loader.symbol("pack.a", "T") == {1: 1, 2: 4, 3: 9, 4: 16, 5: 25}


def test_an_import_is_tried_with_the_statements_that_depend_on_it(load: Load) -> None:
    loader = load(
        {
            "a.py": "try:\n    import no_such_package\n    HAVE = True\nexcept ImportError:\n    HAVE = False\n"
            "try:\n    from pack.missing import thing\nexcept ImportError:\n    thing = None\n"
            "def f():\n    return HAVE, thing\n"
        }
    )
    assert loader.symbol("pack.a", "f")() == (False, None)


@pytest.mark.parametrize(("rocm", "want"), [(True, "from rocm"), (False, "else")])
def test_conditional_definitions_follow_the_substituted_platform(load: Load, rocm: bool, want: str) -> None:
    loader = load(
        {
            "a.py": "from typing import TYPE_CHECKING\nfrom pack.platform import is_rocm\n"
            "if TYPE_CHECKING:\n    from nowhere import Nothing\n"
            "if is_rocm():\n    from pack.rocm import NAME\nelse:\n    NAME = 'else'\n"
            "def f(x: 'Nothing' = None) -> Nothing:\n    return NAME\n",
            "rocm.py": "NAME = 'from rocm'\n",
            "platform.py": "raise RuntimeError\ndef is_rocm():\n    raise RuntimeError\n",
        },
        {"is_rocm": Substitute(lambda: lambda: rocm, "the test decides")},
    )
    assert loader.symbol("pack.a", "f")() == want


def test_annotations_load_nothing_and_constexpr_ones_stay(load: Load) -> None:
    loader = load(
        {
            "a.py": "from no_such_package import Type\nfrom dataclasses import dataclass\n"
            "class tl:\n    constexpr = int\n"
            "def kernel(x: Type, BLOCK: tl.constexpr) -> Type:\n    pass\n"
            "@dataclass\nclass Plan:\n    field: Type\n    size: int = 3\n",
        }
    )
    assert loader.symbol("pack.a", "kernel").__annotations__ == {"x": "Type", "BLOCK": int, "return": "Type"}
    assert loader.symbol("pack.a", "Plan")(field=1).size == 3


def test_future_annotations_hold_where_the_module_has_them(load: Load) -> None:
    loader = load({"a.py": "from __future__ import annotations\ndef kernel(BLOCK: tl.constexpr):\n    pass\n"})
    assert loader.symbol("pack.a", "kernel").__annotations__ == {"BLOCK": "tl.constexpr"}


def test_class_bodies_see_their_own_names(load: Load) -> None:
    loader = load(
        {"a.py": "BASE = 2\nclass C:\n    x = BASE\n    y = x + 1\n    def m(self):\n        return BASE + self.y\n"}
    )
    assert loader.symbol("pack.a", "C")().m() == 5


def test_source_and_lines_are_those_of_the_file(load: Load, tmp_path: Path) -> None:
    text = "import inspect\n\n\ndef jit(fn):\n    fn.source = inspect.getsource(fn)\n    return fn\n\n\n"
    kernel = "@jit\ndef kernel(x):\n    # a comment\n    return x\n"
    loader = load({"a.py": text + kernel})
    loaded = loader.symbol("pack.a", "kernel")
    assert loaded.source == kernel
    assert loaded.__code__.co_firstlineno == 9
    (tmp_path / "pack" / "a.py").write_text("changed\n" * 20)
    assert inspect.getsource(loaded) == kernel


def test_missing_names_are_named(load: Load, tmp_path: Path) -> None:
    loader = load(
        {
            "a.py": "def f():\n    return nowhere + 1\n",
            "b.py": "from pack.a import g\nfrom pack.c import h\ndef f():\n    return g()\ndef k():\n    return h\n",
            "e.py": "import no_such_package\ndef f():\n    return no_such_package.x\n",
            "s.py": "def f(:\n",
        }
    )
    root = tmp_path / "pack"
    for module, name, sentence in (
        ("pack.a", "f", f"{root}/a.py:1 refers to nowhere, which no top-level statement of pack.a binds"),
        ("pack.a", "g", f"{root}/a.py has no top-level name g"),
        ("pack.b", "f", f"{root}/a.py has no top-level name g"),
        ("pack.b", "k", f"{tmp_path} has no module pack.c"),
        ("pack.z", "f", f"{tmp_path} has no module pack.z"),
        ("pack.e", "f", f"{root}/e.py:1 imports what is not installed: No module named 'no_such_package'"),
    ):
        for _ in range(2):
            with pytest.raises(MissingNameError) as caught:
                loader.symbol(module, name)
            assert str(caught.value) == sentence
    with pytest.raises(SourceError, match=r"s\.py cannot be parsed by Python 3\.\d+: "):
        loader.symbol("pack.s", "f")


def test_names_under_a_condition_that_fails_are_left_unbound(load: Load) -> None:
    loader = load({"a.py": "if False:\n    fast = 1\ndef f(go):\n    return fast if go else 2\n"})
    assert loader.symbol("pack.a", "f")(False) == 2
    with pytest.raises(NameError):
        loader.symbol("pack.a", "f")(True)
    with pytest.raises(MissingNameError, match="binds fast only under conditions that do not hold"):
        loader.symbol("pack.a", "fast")


def test_a_refusal_can_be_held_but_not_used(load: Load) -> None:
    reason = "it exists only in a server"
    refusal = {"context": Substitute(lambda: Refusal("context", reason), reason)}
    loader = load(
        {"a.py": "from pack.b import context\ndef f():\n    return context\ndef g(h):\n    return h(context)\n"},
        refusal,
    )
    held = loader.symbol("pack.a", "f")()
    assert isinstance(held, Refusal)
    uses: tuple[Callable[[Any], object], ...] = (
        bool,
        len,
        iter,
        lambda c: c(),
        lambda c: c.x,
        lambda c: c == 1,
        lambda c: c[0],
    )
    for use in uses:
        with pytest.raises(
            SourceError, match="context was used, and cannot be had from the sources alone: it exists only"
        ):
            loader.symbol("pack.a", "g")(use)


def test_substitutes_by_module_and_by_whole_module(load: Load) -> None:
    class Settings:
        SPEED = 3

    given = {
        "pack.b:x": Substitute(lambda: 10, "given"),
        "pack.settings": Substitute(Settings, "given"),
    }
    loader = load(
        {
            "a.py": "import pack.settings as settings\nfrom pack import settings as again\nfrom pack.b import x\n"
            "from pack.c import x as y\ndef f():\n    return x, y, settings.SPEED, again.SPEED\n",
            "b.py": "x = 1\n",
            "c.py": "x = 2\n",
            "settings.py": "raise RuntimeError\n",
        },
        given,
    )
    assert loader.symbol("pack.a", "f")() == (10, 2, 3, 3)


GUARDED = """
def f(x, y):
    assert (
        not x.is_cpu
        and not y.is_cpu
    )
    assert x.is_cuda and x.dim == 2, "two dimensions"
    if not x.is_cuda:
        raise ValueError("on a device")
    if x.device.type != "cuda" or y.dim != 3:
        raise ValueError("three dimensions")
    if not all(t.is_cuda for t in (x, y)):
        raise ValueError("all on a device")
    assert x.dim > 0
    if x.is_cuda:
        return "device"
    return "host"
"""


class Tensor:
    """As much of a tensor as the guards look at."""

    is_cpu = True
    is_cuda = False

    class device:
        type = "cpu"

    def __init__(self, dim: int) -> None:
        self.dim = dim


def test_device_guards_are_dropped_and_recorded_on_the_cpu(load: Load) -> None:
    loader = load({"a.py": GUARDED}, drop_guards=True)
    f = loader.symbol("pack.a", "f")
    assert f(Tensor(2), Tensor(3)) == "host"
    assert loader.dropped_guards == [f"pack/a.py:{line}" for line in (3, 7, 8, 10, 12)]
    with pytest.raises(AssertionError, match="two dimensions"):
        f(Tensor(3), Tensor(3))
    with pytest.raises(ValueError, match="three dimensions"):
        f(Tensor(2), Tensor(2))


def test_device_guards_stay_elsewhere(load: Load) -> None:
    loader = load({"a.py": GUARDED})
    with pytest.raises(AssertionError):
        loader.symbol("pack.a", "f")(Tensor(2), Tensor(3))
    assert loader.dropped_guards == []


def test_two_loaders_share_nothing_but_the_parsed_file(load: Load, tmp_path: Path) -> None:
    load({"a.py": "from pack.p import arch\nSEEN = []\ndef f():\n    SEEN.append(arch)\n    return SEEN\n"})
    tree = SourceTree(tmp_path, "pack")
    loaders = [
        TreeLoader(
            tree, f"test_source_tree.pair.{name}", {"arch": Substitute(functools.partial(str, name), "test")}, False
        )
        for name in ("one", "two")
    ]
    first, second = (loader.symbol("pack.a", "f") for loader in loaders)
    assert first() == ["one"]
    assert second() == ["two"]
    assert first.__code__ is second.__code__
    assert first.__module__ != second.__module__


def test_a_replaced_name_is_seen_by_its_module_and_then_restored(load: Load) -> None:
    loader = load(
        {
            "a.py": "import functools\ndef count():\n    return 4\n"
            "@functools.lru_cache\ndef splits():\n    return count() * 2\n"
            "class C:\n    @staticmethod\n    @functools.cache\n    def s():\n        return count()\n",
        }
    )
    splits, method = loader.symbol("pack.a", "splits"), loader.symbol("pack.a", "C").s
    assert (splits(), method()) == (8, 4)
    with loader.replaced("pack.a", "count", lambda: 1):
        assert (splits(), method()) == (2, 1)
        assert loader.symbol("pack.a", "count")() == 1
    assert (splits(), method()) == (8, 4)
    with pytest.raises(MissingNameError), loader.replaced("pack.a", "no_such_name", 1):
        pass


def test_replacing_a_substituted_name_before_anything_refers_to_it(load: Load) -> None:
    loader = load(
        {"a.py": "def count():\n    raise RuntimeError\ndef f():\n    return count()\n"},
        {"count": Substitute(lambda: lambda: 7, "given")},
    )
    with loader.replaced("pack.a", "count", lambda: 1):
        f = loader.symbol("pack.a", "f")
        assert f() == 1
    assert f() == 7


def test_star_imports_are_searched(load: Load) -> None:
    loader = load(
        {"a.py": "from pack.b import *\nfrom math import *\ndef f():\n    return X + floor(0.5)\n", "b.py": "X = 2\n"}
    )
    assert loader.symbol("pack.a", "f")() == 2


def test_a_fingerprint_covers_names_and_bytes_and_no_order(load: Load, tmp_path: Path) -> None:
    load({"a.py": "X = 1\n", "b.py": "X = 2\n"})
    before = SourceTree(tmp_path, "pack").fingerprint(["pack.a", "pack.b"])
    assert SourceTree(tmp_path, "pack").fingerprint(["pack.b", "pack.a", "pack.a"]) == before
    (tmp_path / "pack" / "b.py").write_text("X = 3\n")
    assert SourceTree(tmp_path, "pack").fingerprint(["pack.a", "pack.b"]) != before
    assert SourceTree(tmp_path, "pack").fingerprint(["pack.a"]) != before
