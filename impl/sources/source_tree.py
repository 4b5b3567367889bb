"""How can one function of somebody's package run without importing the package?

A module is parsed once a process. Asked for a top-level name, the loader executes the statements that bind it, and
those that bind what they refer to, in a namespace of its own; nothing else of the module runs. Every statement is
compiled under its own file name and line numbers, so that `inspect.getsource`, with which `triton.jit` reads kernels,
sees the file.
"""

from __future__ import annotations
import __future__ as future_features

import ast
import builtins
import contextlib
import copy
import dis
import functools
import hashlib
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

IMPORT_HOOK = "__import_from_tree__"
"""The name under which a private namespace holds what replaces imports from the tree itself."""

_CONDITION = "__condition_of_an_if__"
_MODULE_NAMES = frozenset(
    {"__name__", "__file__", "__doc__", "__package__", "__spec__", "__loader__", "__annotations__", IMPORT_HOOK}
)


class SourceError(Exception):
    """Somebody's sources cannot be used as asked; the message is one sentence that says why."""


class MissingNameError(SourceError, ImportError):
    """A module or a name that the tree does not hold; an `ImportError` too, for the tree's own `except ImportError`."""


@dataclass(frozen=True)
class Substitute:
    """Something given to the loaded code in place of what its own tree would have provided, and why it must be.

    `make` is called once a loader, when the name is first needed.
    """

    make: Callable[[], object]
    reason: str


class Refusal:
    """Stands for what exists only in a running server: it can be held and passed on; any use raises `SourceError`."""

    def __init__(self, name: str, reason: str) -> None:
        self.__dict__["_sentence"] = f"{name} was used, and cannot be had from the sources alone: {reason}"

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise SourceError(self.__dict__["_sentence"])

    __call__ = __bool__ = __iter__ = __len__ = __contains__ = __getitem__ = __setattr__ = __enter__ = _refuse
    __int__ = __float__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __instancecheck__ = __mro_entries__ = _refuse

    def __eq__(self, other: object) -> bool:
        self._refuse()

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> object:
        # Dunder probes come from inspect, copy and the like, not from the loaded code.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._refuse()


@dataclass(frozen=True)
class _Binding:
    """A statement that binds or mutates a name at a module's top level, under the `if`s that enclose it.

    A condition is a statement that assigns the test of an `if`, and the truth value that leads here.
    """

    statement: ast.stmt
    conditions: tuple[tuple[ast.stmt, bool], ...]


@dataclass(frozen=True)
class _Unit:
    """A compiled statement.

    `immediate` names are read when it is executed, `deferred` ones when what it defines is called. `stored` names are
    bound by the statement or by a class body in it, so that a read of one need not be of a global.
    """

    code: types.CodeType
    immediate: tuple[str, ...]
    deferred: tuple[str, ...]
    stored: frozenset[str]
    dropped_lines: tuple[int, ...]


class ParsedModule:
    """One source file, read and parsed once: which statements bind which name, and their compiled form.

    It holds no values, so that loaders for different platforms share it.
    """

    def __init__(self, name: str, path: Path, package: str) -> None:
        self.name = name
        self.path = path
        self.package = package
        data = path.read_bytes()
        self.sha256 = hashlib.sha256(data).hexdigest()
        try:
            text = data.decode("utf-8")
            tree = ast.parse(text, str(path))
        except (SyntaxError, UnicodeDecodeError) as error:
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            raise SourceError(f"{path} cannot be parsed by Python {version}: {error}") from error
        # An entry without a modification time is never refreshed: inspect.getsource goes on seeing what was
        # parsed here even if the file is edited meanwhile.
        linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
        self.bindings: dict[str, list[_Binding]] = {}
        self.star_imports: list[tuple[str, _Binding]] = []
        self.globals_set_inside: set[str] = set()
        self._units: dict[tuple[int, bool], _Unit] = {}
        self._flags = 0
        self._is_package = path.name == "__init__.py"
        self._imported: set[str] = set()
        self._index(tree.body, ())

    def absolute(self, node: ast.ImportFrom) -> str:
        """The absolute name of the module that an import statement of this file names."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".") if self._is_package else self.name.split(".")[:-1]
        parts = parts[: len(parts) - (node.level - 1)]
        return ".".join([*parts, node.module] if node.module else parts)

    def is_in_tree(self, module: str) -> bool:
        """Whether a module belongs to the same package as this file."""
        return module == self.package or module.startswith(self.package + ".")

    def unit(self, statement: ast.stmt, drop_guards: bool) -> _Unit:
        """A statement compiled, with the device guards in it dropped or kept."""
        key = (id(statement), drop_guards)
        if key not in self._units:
            dropped: tuple[int, ...] = ()
            node = statement
            if drop_guards and _mentions_device(statement):
                editor = _DropDeviceGuards()
                node = editor.visit(copy.deepcopy(statement))
                dropped = tuple(sorted(set(editor.lines)))
            node = _Detach(self).visit(node)
            module = ast.fix_missing_locations(ast.Module([node], []))
            code = compile(module, str(self.path), "exec", flags=self._flags, dont_inherit=True)
            self._units[key] = _Unit(code, *_global_reads(code), dropped)
        return self._units[key]

    def _index(self, body: Sequence[ast.stmt], conditions: tuple[tuple[ast.stmt, bool], ...]) -> None:
        for statement in body:
            if isinstance(statement, ast.If):
                test = _assign(statement.test, _CONDITION, statement.test)
                self._index(statement.body, (*conditions, (test, True)))
                self._index(statement.orelse, (*conditions, (test, False)))
            elif isinstance(statement, ast.Import | ast.ImportFrom):
                self._index_import(statement, conditions)
            else:
                binding = _Binding(statement, conditions)
                for name in _bound_names(statement, frozenset(self.bindings) - self._imported):
                    self.bindings.setdefault(name, []).append(binding)
            for node in ast.walk(statement) if isinstance(statement, ast.FunctionDef | ast.ClassDef) else ():
                if isinstance(node, ast.Global):
                    self.globals_set_inside.update(node.names)

    def _index_import(self, node: ast.Import | ast.ImportFrom, conditions: tuple[tuple[ast.stmt, bool], ...]) -> None:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            for alias in node.names:
                self._flags |= getattr(future_features, alias.name).compiler_flag
            return
        for alias in node.names:
            single = copy.copy(node)
            single.names = [alias]
            binding = _Binding(single, conditions)
            if isinstance(node, ast.ImportFrom) and alias.name == "*":
                self.star_imports.append((self.absolute(node), binding))
                continue
            name = alias.asname or (alias.name.split(".")[0] if isinstance(node, ast.Import) else alias.name)
            self._imported.add(name)
            self.bindings.setdefault(name, []).append(binding)


class SourceTree:
    """A package lying on disk, given by the directory that holds it and its name.

    A file is read once in a process: what was read is what runs, is shown by `inspect.getsource` and is fingerprinted.
    """

    def __init__(self, root: Path, package: str) -> None:
        self.root = root
        self.package = package
        self._modules: dict[str, ParsedModule] = {}

    def path(self, module: str) -> Path | None:
        """The file of a module, or None if the tree has none."""
        if module != self.package and not module.startswith(self.package + "."):
            return None
        stem = self.root.joinpath(*module.split("."))
        for candidate in (stem.with_name(stem.name + ".py"), stem / "__init__.py"):
            if candidate.is_file():
                return candidate
        return None

    def has(self, module: str) -> bool:
        """Whether the tree holds a module; a directory of modules without an `__init__.py` counts."""
        return self.path(module) is not None or (
            module.startswith(self.package + ".") and self.root.joinpath(*module.split(".")).is_dir()
        )

    def module(self, name: str) -> ParsedModule:
        """The parsed module; `MissingNameError` if the tree has no such file."""
        if name not in self._modules:
            path = self.path(name)
            if path is None:
                raise MissingNameError(f"{self.root} has no module {name}")
            self._modules[name] = ParsedModule(name, path, self.package)
        return self._modules[name]

    def fingerprint(self, modules: Sequence[str]) -> str:
        """The sha256 over the names and the bytes of modules, in an order of its own."""
        digest = hashlib.sha256()
        for name in sorted(set(modules)):
            digest.update(f"{name}\0{self.module(name).sha256}\n".encode())
        return digest.hexdigest()


@functools.cache
def source_tree(root: Path, package: str) -> SourceTree:
    """The one `SourceTree` of a directory and a package name in this process."""
    return SourceTree(root, package)


class TreeLoader:
    """Loads names out of a `SourceTree` into namespaces that no other loader shares.

    `substitutes` maps what the loaded code must be given to a `Substitute`. Its keys are bare names (`logger`: that
    name wherever it is bound), `module:name` (that name of that module) or dotted modules (`vllm.envs`: all of it).
    `drop_guards` drops assertions that a tensor lies on a device, for executions on the CPU; each one dropped is
    appended to `dropped_guards` as `path:line`. `label` tells the namespaces of loaders apart in `sys.modules`.
    """

    def __init__(self, tree: SourceTree, label: str, substitutes: Mapping[str, Substitute], drop_guards: bool) -> None:
        self.tree = tree
        self.dropped_guards: list[str] = []
        self._label = label
        self._substitutes = dict(substitutes)
        self._drop_guards = drop_guards
        self._given: dict[str, object] = {}
        self._namespaces: dict[str, types.ModuleType] = {}
        self._started: dict[str, set[int]] = {}
        self._executing: set[int] = set()
        self._conditions: dict[int, bool] = {}
        self._bound: set[tuple[str, str]] = set()
        self._caches: list[Callable[[], None]] = []

    @property
    def loaded_modules(self) -> list[str]:
        """The modules of which a statement was executed so far, sorted."""
        return sorted(name for name, started in self._started.items() if started)

    def symbol(self, module: str, name: str) -> Any:
        """The value of a top-level name of a module, loaded with everything that it refers to.

        Raises `SourceError` where the module, the name or something that it needs is missing.
        """
        if (module, name) in self._bound and name in self._namespace(module).__dict__:
            return self._namespace(module).__dict__[name]
        for key in (name, f"{module}:{name}"):
            if key in self._substitutes:
                return self._substitute(key)
        if module in self._substitutes:
            return getattr(self._substitute(module), name)
        if not self._bind(module, name):
            raise MissingNameError(self._no_such_name(module, name))
        if name not in self._namespace(module).__dict__:
            raise SourceError(f"{module}.{name} is needed by its own definition, before it is defined")
        return self._namespace(module).__dict__[name]

    @contextlib.contextmanager
    def replaced(self, module: str, name: str, value: object) -> Iterator[None]:
        """For the duration of a `with`, what code of `module` finds under its global `name`.

        Modules that imported the name keep their own binding, as in Python. The caches of loaded functions are emptied
        at both ends.
        """
        before = self.symbol(module, name)
        namespace = self._namespace(module).__dict__
        # A substituted name enters the namespace only once something refers to it.
        self._bound.add((module, name))
        namespace[name] = value
        self.forget_cached_results()
        try:
            yield
        finally:
            namespace[name] = before
            self.forget_cached_results()

    def forget_cached_results(self) -> None:
        """Empty the `functools.cache`s of everything loaded so far."""
        for clear in self._caches:
            clear()

    def defined(self, name: str, value: object) -> None:
        """Called with every function, class or object that a statement of the tree has just defined."""

    def _substitute(self, key: str) -> object:
        if key not in self._given:
            self._given[key] = self._substitutes[key].make()
        return self._given[key]

    def _namespace(self, module: str) -> types.ModuleType:
        if module in self._namespaces:
            return self._namespaces[module]
        private = types.ModuleType(f"{self._label}.{module}")
        path = self.tree.path(module)
        private.__file__ = None if path is None else str(path)
        private.__dict__[IMPORT_HOOK] = self._import_from_tree

        def attribute(name: str) -> object:
            if name.startswith("__") and name.endswith("__"):
                raise AttributeError(name)
            try:
                return self.symbol(module, name)
            except MissingNameError as error:
                raise AttributeError(str(error)) from error

        private.__dict__["__getattr__"] = attribute
        self._namespaces[module] = private
        self._started[module] = set()
        # dataclasses and inspect look a class's module up here.
        sys.modules[private.__name__] = private
        return private

    def _module_object(self, module: str) -> object:
        if module in self._substitutes:
            return self._substitute(module)
        if not self.tree.has(module):
            raise MissingNameError(f"{self.tree.root} has no module {module}")
        return self._namespace(module)

    def _import_from_tree(self, module: str, name: str | None) -> object:
        return self._module_object(module) if name is None else self.symbol(module, name)

    def _no_such_name(self, module: str, name: str) -> str:
        path = self.tree.path(module) or self.tree.root / Path(*module.split("."))
        if path.suffix == ".py" and name in self.tree.module(module).bindings:
            return f"{path} binds {name} only under conditions that do not hold for {self._label}"
        return f"{path} has no top-level name {name}"

    def _bind(self, module: str, name: str) -> bool:
        """Bring a name into the namespace of a module; False if nothing reached at its top level binds it."""
        if (module, name) in self._bound:
            return True
        namespace = self._namespace(module).__dict__
        # A directory without an __init__.py binds nothing but its submodules.
        if self.tree.path(module) is not None or not self.tree.has(module):
            parsed = self.tree.module(module)
            for key in (name, f"{module}:{name}"):
                if key in self._substitutes and name in parsed.bindings:
                    namespace[name] = self._substitute(key)
                    self._bound.add((module, name))
                    return True
            # Before the statements run: what they need may need this name in turn.
            self._bound.add((module, name))
            try:
                for binding in parsed.bindings.get(name, ()):
                    if self._holds(parsed, binding):
                        self._execute(parsed, binding.statement)
                if name not in namespace and name not in parsed.bindings:
                    self._bind_from_star(parsed, name)
            except BaseException:
                self._bound.discard((module, name))
                raise
            if name in namespace or self._is_being_executed(parsed, name):
                return True
            self._bound.discard((module, name))
        if not self.tree.has(f"{module}.{name}"):
            return False
        namespace[name] = self._module_object(f"{module}.{name}")
        self._bound.add((module, name))
        return True

    def _is_being_executed(self, parsed: ParsedModule, name: str) -> bool:
        return any(id(binding.statement) in self._executing for binding in parsed.bindings.get(name, ()))

    def _bind_from_star(self, parsed: ParsedModule, name: str) -> None:
        namespace = self._namespace(parsed.name).__dict__
        for module, binding in parsed.star_imports:
            if not self._holds(parsed, binding):
                continue
            if not parsed.is_in_tree(module):
                self._execute(parsed, binding.statement)
            elif self.tree.path(module) is not None and self._bind(module, name):
                namespace[name] = self.symbol(module, name)
            if name in namespace:
                return

    def _holds(self, parsed: ParsedModule, binding: _Binding) -> bool:
        for test, wanted in binding.conditions:
            if id(test) not in self._conditions:
                self._execute(parsed, test)
                self._conditions[id(test)] = bool(self._namespace(parsed.name).__dict__.pop(_CONDITION))
            if self._conditions[id(test)] != wanted:
                return False
        return True

    def _execute(self, parsed: ParsedModule, statement: ast.stmt) -> None:
        started = self._started[parsed.name]
        if id(statement) in started:
            return
        started.add(id(statement))
        where = f"{parsed.path}:{statement.lineno}"
        try:
            unit = parsed.unit(statement, self._drop_guards)
            self._executing.add(id(statement))
            try:
                self._need(parsed, unit, unit.immediate, where)
                self._run(parsed, statement, unit, where)
            finally:
                self._executing.discard(id(statement))
            self._need(parsed, unit, unit.deferred, where)
        except BaseException:
            started.discard(id(statement))
            raise

    def _run(self, parsed: ParsedModule, statement: ast.stmt, unit: _Unit, where: str) -> None:
        namespace = self._namespace(parsed.name).__dict__
        before = dict(namespace)
        try:
            exec(unit.code, namespace)
        except SourceError:
            raise
        except ImportError as error:
            raise MissingNameError(f"{where} imports what is not installed: {error}") from error
        except Exception as error:
            raise SourceError(f"{where} raised {type(error).__name__} when it was executed: {error}") from error
        self.dropped_guards.extend(f"{parsed.path.relative_to(self.tree.root)}:{line}" for line in unit.dropped_lines)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            return
        for name, value in namespace.items():
            if not name.startswith("__") and (name not in before or before[name] is not value):
                self._defined(name, value)

    def _need(self, parsed: ParsedModule, unit: _Unit, names: Sequence[str], where: str) -> None:
        for name in names:
            if name in _MODULE_NAMES or (name not in parsed.bindings and hasattr(builtins, name)):
                continue
            # Under an `if` that does not hold, or set by `global` in a call, Python too would leave the name unbound.
            if self._bind(parsed.name, name) or name in parsed.bindings or name in parsed.globals_set_inside:
                continue
            if name not in unit.stored:
                raise MissingNameError(f"{where} refers to {name}, which no top-level statement of {parsed.name} binds")

    def _defined(self, name: str, value: object) -> None:
        members = list(vars(value).values()) if isinstance(value, type) else []
        for item in (value, *members):
            item = getattr(item, "__func__", item)
            clear = getattr(item, "cache_clear", None) if isinstance(item, functools._lru_cache_wrapper) else None
            if clear is not None:
                self._caches.append(clear)
        self.defined(name, value)


class _Detach(ast.NodeTransformer):
    """Rewrites imports from the tree itself into calls of the loader, and annotations into strings.

    An annotation would pull in every type that a signature mentions; only those of kernel parameters (`constexpr`) have
    a meaning when the code runs.
    """

    def __init__(self, parsed: ParsedModule) -> None:
        self.parsed = parsed

    def visit_Import(self, node: ast.Import) -> ast.stmt | list[ast.stmt]:
        result: list[ast.stmt] = []
        for alias in node.names:
            if not self.parsed.is_in_tree(alias.name):
                result.append(ast.copy_location(ast.Import([alias]), node))
            elif alias.asname:
                result.append(self._bind(node, alias.asname, alias.name, None))
            else:
                result.append(self._bind(node, self.parsed.package, self.parsed.package, None))
        return result if len(result) > 1 else result[0]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt | list[ast.stmt]:
        module = self.parsed.absolute(node)
        if not self.parsed.is_in_tree(module):
            return node
        result = [self._bind(node, alias.asname or alias.name, module, alias.name) for alias in node.names]
        return result if len(result) > 1 else result[0]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = _as_text(node.annotation)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        if node.annotation is not None:
            node.annotation = _as_text(node.annotation)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.returns is not None:
            node.returns = _as_text(node.returns)
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        if node.returns is not None:
            node.returns = _as_text(node.returns)
        return self.generic_visit(node)

    @staticmethod
    def _bind(node: ast.stmt, target: str, module: str, name: str | None) -> ast.stmt:
        call = ast.Call(ast.Name(IMPORT_HOOK, ast.Load()), [ast.Constant(module), ast.Constant(name)], [])
        return _assign(call, target, node)


class _DropDeviceGuards(ast.NodeTransformer):
    """Removes the demand for a device from assertions and from `if ...: raise`, keeping what else they demand."""

    def __init__(self) -> None:
        self.lines: list[int] = []

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        rest = _without(node.test, _demands_device, ast.And)
        if rest is node.test:
            return node
        self.lines.append(node.lineno)
        if rest is None:
            return ast.copy_location(ast.Pass(), node)
        node.test = rest
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if len(node.body) != 1 or not isinstance(node.body[0], ast.Raise) or node.orelse:
            return node
        rest = _without(node.test, _refuses_cpu, ast.Or)
        if rest is node.test:
            return node
        self.lines.append(node.lineno)
        if rest is None:
            return ast.copy_location(ast.Pass(), node)
        node.test = rest
        return node


def _without(
    test: ast.expr, is_device_term: Callable[[ast.expr], bool], joiner: type[ast.And | ast.Or]
) -> ast.expr | None:
    """A test less its device terms: the same object if it has none, None if it has nothing else."""
    if is_device_term(test):
        return None
    if not isinstance(test, ast.BoolOp) or not isinstance(test.op, joiner):
        return test
    kept = [value for value in test.values if not is_device_term(value)]
    if len(kept) == len(test.values):
        return test
    return kept[0] if len(kept) == 1 else ast.copy_location(ast.BoolOp(test.op, kept), test)


def _demands_device(test: ast.expr) -> bool:
    match test:
        case ast.Attribute(attr="is_cuda"):
            return True
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _refuses_cpu(operand)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(map(_demands_device, values))
        case ast.Compare(left=left, ops=[operator], comparators=[ast.Constant(value=kind)]) if _is_device_type(left):
            return (type(operator), kind) in ((ast.Eq, "cuda"), (ast.NotEq, "cpu"))
        case ast.Call(func=ast.Name(id="all"), args=[ast.GeneratorExp(elt=element) | ast.ListComp(elt=element)]):
            return _demands_device(element)
    return False


def _refuses_cpu(test: ast.expr) -> bool:
    match test:
        case ast.Attribute(attr="is_cpu"):
            return True
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _demands_device(operand)
        case ast.BoolOp(op=ast.Or(), values=values):
            return all(map(_refuses_cpu, values))
        case ast.Compare(left=left, ops=[operator], comparators=[ast.Constant(value=kind)]) if _is_device_type(left):
            return (type(operator), kind) in ((ast.NotEq, "cuda"), (ast.Eq, "cpu"))
        case ast.Call(func=ast.Name(id="any"), args=[ast.GeneratorExp(elt=element) | ast.ListComp(elt=element)]):
            return _refuses_cpu(element)
    return False


def _is_device_type(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "type"
        and (isinstance(node.value, ast.Attribute) and node.value.attr == "device")
    )


def _mentions_device(statement: ast.stmt) -> bool:
    attributes = (node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute))
    return any(attribute in ("is_cuda", "is_cpu", "device") for attribute in attributes)


def _assign(value: ast.expr, target: str, place: ast.stmt | ast.expr) -> ast.stmt:
    """The statement `target = value`, reported as lying at `place`."""
    assign = ast.copy_location(ast.Assign([ast.Name(target, ast.Store())], value), place)
    for child in ast.walk(assign):
        if not hasattr(child, "lineno"):
            ast.copy_location(child, place)
    return assign


def _as_text(annotation: ast.expr) -> ast.expr:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation
    text = ast.unparse(annotation)
    return annotation if "constexpr" in text else ast.copy_location(ast.Constant(text), annotation)


def _bound_names(statement: ast.stmt, assigned: frozenset[str]) -> list[str]:
    """The top-level names that a statement binds, and those of `assigned` that it changes in place.

    Later statements may fill a table (`TABLE[key] = ...`, `TABLE.update(...)`); without them it would be short.
    """
    names: dict[str, None] = {}

    def target(node: ast.expr) -> None:
        match node:
            case ast.Name(id=name):
                names[name] = None
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for element in elements:
                    target(element)
            case ast.Starred(value=value):
                target(value)
            case ast.Subscript(value=value) | ast.Attribute(value=value):
                owner(value)

    def owner(node: ast.expr) -> None:
        while isinstance(node, ast.Subscript | ast.Attribute):
            node = node.value
        if isinstance(node, ast.Name) and node.id in assigned:
            names[node.id] = None

    def visit(node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names[name] = None
                return
            case ast.Assign(targets=targets):
                for item in targets:
                    target(item)
            case ast.AnnAssign(target=item, value=value) if value is not None:
                target(item)
            case ast.AugAssign(target=item) | ast.For(target=item):
                target(item)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    names[alias.asname or alias.name.split(".")[0]] = None
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=value))):
                owner(value)
            case ast.With(items=items):
                for entry in items:
                    if entry.optional_vars is not None:
                        target(entry.optional_vars)
        for child in ast.walk(node):
            if isinstance(child, ast.NamedExpr):
                names[child.target.id] = None
        for field in ("body", "orelse", "finalbody"):
            for inner in getattr(node, field, ()):
                visit(inner)
        for handler in getattr(node, "handlers", ()):
            for inner in handler.body:
                visit(inner)

    visit(statement)
    return list(names)


def _global_reads(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]:
    """The globals read when code is executed, those read when functions defined in it are called, and the names stored.

    Stored by the code itself or by a class body in it, that is: not by a function.
    """
    immediate: dict[str, None] = {}
    deferred: dict[str, None] = {}
    stored: set[str] = set()

    def visit(item: types.CodeType, at_once: bool) -> None:
        names = immediate if at_once else deferred
        for instruction in dis.get_instructions(item):
            if instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"):
                names[instruction.argval] = None
            elif instruction.opname == "STORE_NAME":
                stored.add(instruction.argval)
        for constant in item.co_consts:
            if isinstance(constant, types.CodeType):
                is_class_body = not constant.co_flags & inspect.CO_OPTIMIZED
                is_comprehension = constant.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
                visit(constant, at_once and (is_class_body or is_comprehension))

    visit(code, True)
    return tuple(immediate), tuple(name for name in deferred if name not in immediate), frozenset(stored)
