"""Is what Triton spends in compiling counted, and is whoever listened before left alone?"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from impl.executions import compile_time
from impl.executions.compile_time import compiling


def compiled(knobs: Any, microseconds: int) -> None:
    """Stands in for Triton's compiler, which calls the listener with nothing but keywords."""
    knobs.compilation.listener(src=None, metadata={}, times=SimpleNamespace(total=microseconds), cache_hit=False)


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def placed(listener: Any = None) -> Any:
        knobs = SimpleNamespace(compilation=SimpleNamespace(listener=listener))
        monkeypatch.setattr(compile_time, "_knobs", lambda: knobs)
        return knobs

    return placed


def test_the_seconds_of_all_compilations_are_summed(standin: Callable[..., Any]) -> None:
    knobs = standin()
    with compiling(compiles=True) as spent:
        compiled(knobs, 1_500_000)
        compiled(knobs, 250_000)
    assert spent.seconds == pytest.approx(1.75)
    assert knobs.compilation.listener is None


def test_another_listener_hears_everything_and_stays(standin: Callable[..., Any]) -> None:
    heard: list[Any] = []

    def listener(**said: Any) -> None:
        heard.append(said["times"].total)

    knobs = standin(listener)
    with pytest.raises(ArithmeticError), compiling(compiles=True) as spent:
        compiled(knobs, 3)
        raise ArithmeticError
    assert (heard, spent.seconds) == ([3], pytest.approx(3e-6))
    assert knobs.compilation.listener is listener


def test_the_interpreter_compiles_nothing_and_nothing_is_touched(standin: Callable[..., Any]) -> None:
    knobs = standin("untouched")
    with compiling(compiles=False) as spent:
        assert knobs.compilation.listener == "untouched"
    assert spent.seconds == 0


@pytest.mark.parametrize("missing", ["not installed", "broken", "without a listener"])
def test_without_a_listening_triton_no_time_is_counted(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def imported(name: str) -> Any:
        assert name == "triton.knobs"
        if missing == "broken":
            raise ImportError("libtriton.so: cannot open shared object file")
        return SimpleNamespace()

    find = None if missing == "not installed" else object()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: find)
    monkeypatch.setattr("importlib.import_module", imported)
    with compiling(compiles=True) as spent:
        pass
    assert spent.seconds == 0


def test_triton_has_the_place_that_is_listened_at() -> None:
    knobs = compile_time._knobs()
    assert knobs is not None
    assert knobs.compilation.listener is None
