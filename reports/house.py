"""How do the four rooms, and packages of the same names in a user's project, live in one process?

`cases`, `oracle`, `impl` and `reports` are common words. While the house works, the four names mean its own packages;
while the user's code works, they mean what Python would have found without us. Nothing is ever loaded twice: where
nothing shadows a room, both sides share its modules.

Imports nothing of the house, so that it can be loaded from its file whatever stands in front on `sys.path`.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOMS = ("cases", "oracle", "impl", "reports")
# Holds what there is once in a process, however often this file was loaded and under which names.
_KEEPER = "mla_oracle_sides"

Modules = dict[str, types.ModuleType]


class Sides:
    """Puts the house's modules or the user's behind the four names; the user's stand there at first."""

    def __init__(self, house: Path) -> None:
        self.house = house
        self._inside = False
        self._ours: Modules = {}
        self._theirs: Modules = {}
        sys.meta_path.insert(0, self)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While open, the four names are the house's."""
        if self._inside:
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """While open, within `inside`, the four names are the user's again: for the time in which the user's code runs."""
        if not self._inside:
            yield
            return
        self._leave()
        try:
            yield
        finally:
            self._enter()

    def _enter(self) -> None:
        self._theirs = _taken_from_modules()
        # What the user has imported of us is ours already.
        shared = {room for room in ROOMS if self._is_ours(self._theirs.get(room))}
        self._ours.update({name: found for name, found in self._theirs.items() if name.partition(".")[0] in shared})
        sys.modules.update(self._ours)
        self._inside = True

    def _leave(self) -> None:
        self._inside = False
        self._ours = _taken_from_modules()
        sys.modules.update(self._theirs)

    def _is_ours(self, room: types.ModuleType | None) -> bool:
        """Whether a top-level package is one of the house's rooms."""
        file = getattr(room, "__file__", None)
        return room is not None and bool(file) and Path(str(file)).resolve().parent == self.house / room.__name__

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Where a module of a room comes from, for Python's import system; None for other names."""
        top = name.partition(".")[0]
        if top not in ROOMS:
            return None
        if self._inside:
            return importlib.machinery.PathFinder.find_spec(name, [str(self.house)] if path is None else path, target)
        if top != name:
            known = self._ours.get(name) if self._is_ours(sys.modules.get(top)) else None
            return _handing_over(known) if known is not None else None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None:
                mine = bool(spec.origin) and Path(str(spec.origin)).resolve().parent == self.house / name
                return _handing_over(self._ours[name]) if mine and name in self._ours else spec
        return None


class _HandOver(importlib.abc.Loader):
    """A loader that loads nothing: the module is there already."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec


def _handing_over(module: types.ModuleType) -> importlib.machinery.ModuleSpec:
    origin = getattr(module, "__file__", None)
    places = getattr(module, "__path__", None)
    spec = importlib.machinery.ModuleSpec(
        module.__name__, _HandOver(module), origin=origin, is_package=places is not None
    )
    if spec.submodule_search_locations is not None:
        spec.submodule_search_locations.extend(places or ())
    return spec


def _taken_from_modules() -> Modules:
    """The modules of the four names, which `sys.modules` no longer holds then."""
    names = [name for name in sys.modules if name.partition(".")[0] in ROOMS]
    return {name: sys.modules.pop(name) for name in names}


def sides_of(house: Path) -> Sides:
    """The sides of the house in this directory; there is one such object in a process."""
    keeper = sys.modules.setdefault(_KEEPER, types.ModuleType(_KEEPER))
    found: Sides | None = vars(keeper).get(str(house))
    if found is None:
        found = vars(keeper)[str(house)] = Sides(house)
    return found
