"""What does a kernel's source mean, and how does a launch of it run on this CPU?

Imported only after ``impl.executions.interpreter`` has checked the installed Triton, whose interpreter it takes over.
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

from impl.executions.interpreter import KernelFault
from impl.executions.interpreter_builder import ADDRESS, NUMPY_TYPES, Handle
from impl.executions.interpreter_language import BUILDER, SEMANTIC, bind_language, bind_libdevice, counted
from impl.executions.interpreter_memory import Memory

constexpr, tensor = tl.constexpr, tl.tensor


def _unwrapped(value: Any) -> Any:
    return value.value if isinstance(value, constexpr) else value


class _Language:
    """What rewritten kernels call for the syntax that Python would evaluate differently from Triton's compiler."""

    @staticmethod
    def assign(value: Any) -> Any:
        return value if isinstance(value, tensor) else SEMANTIC.to_tensor(value, False)

    @staticmethod
    def logical_not(value: Any) -> Any:
        if isinstance(value, tensor):
            return SEMANTIC.not_(_truth(value))
        return not value

    @staticmethod
    def both(*values: Callable[[], Any]) -> Any:
        return _boolean_chain(values, stop=False, join=lambda x, y: SEMANTIC.and_(x, y))

    @staticmethod
    def either(*values: Callable[[], Any]) -> Any:
        return _boolean_chain(values, stop=True, join=lambda x, y: SEMANTIC.or_(x, y))

    @staticmethod
    def compare(*steps: Any) -> Any:
        """``a < b <= c`` as (a, <, b, <=, c), every operand evaluated once."""
        verdict: Any = True
        for left, relation, right in zip(steps[:-2:2], steps[1:-1:2], steps[2::2], strict=True):
            step = relation(left, right)
            if isinstance(verdict, tensor) and isinstance(step, tensor):
                verdict = SEMANTIC.and_(verdict, step)
            elif isinstance(step, tensor) or isinstance(verdict, tensor):
                known, other = (verdict, step) if isinstance(step, tensor) else (step, verdict)
                if not known:
                    return False
                verdict = other
            elif not step:
                return False
        return verdict

    @staticmethod
    def extreme(function: Any, *values: Any) -> Any:
        """``max`` and ``min``, which are lane by lane as soon as one of the values is a tensor."""
        if function not in (max, min) or not any(isinstance(value, tensor) for value in values):
            return function(*values)
        return functools.reduce(tl.maximum if function is max else tl.minimum, values)

    loop = staticmethod(counted)


def _truth(value: Any) -> Any:
    return value if value.dtype is tl.int1 else SEMANTIC.cast(value, tl.int1)


def _boolean_chain(values: tuple[Callable[[], Any], ...], stop: bool, join: Callable[[Any, Any], Any]) -> Any:
    """``and`` and ``or``: compile-time values short-circuit, everything else is evaluated and combined lane by lane."""
    result: Any = None
    value: Any = None
    for make in values:
        value = make()
        if not isinstance(value, tensor):
            if bool(value) is stop:
                return value
            continue
        result = _truth(value) if result is None else join(result, _truth(value))
    return value if result is None else result


_RELATIONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip
_LANGUAGE, _OPERATOR = "_triton_language_", "_triton_operator_"


class Rewriter(ast.NodeTransformer):
    """Turns a kernel's source into Python with the meaning that Triton's compiler gives it."""

    def _call(self, method: str, arguments: list[ast.expr], at: ast.AST) -> ast.expr:
        function = ast.Attribute(ast.Name(_LANGUAGE, ast.Load()), method, ast.Load())
        return ast.copy_location(ast.Call(function, arguments, []), at)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = self._call("assign", [node.value], node.value)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return self._call("logical_not", [node.operand], node) if isinstance(node.op, ast.Not) else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        nothing = ast.arguments([], [], None, [], [], None, [])
        later: list[ast.expr] = [ast.copy_location(ast.Lambda(nothing, value), value) for value in node.values]
        return self._call("both" if isinstance(node.op, ast.And) else "either", later, node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) == 1 or any(type(op) not in _RELATIONS for op in node.ops):
            return node
        steps: list[ast.expr] = [node.left]
        for op, value in zip(node.ops, node.comparators, strict=True):
            steps += [ast.Attribute(ast.Name(_OPERATOR, ast.Load()), _RELATIONS[type(op)], ast.Load()), value]
        return self._call("compare", steps, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        plain = isinstance(node.func, ast.Name) and node.func.id in ("max", "min") and not node.keywords
        return self._call("extreme", [node.func, *node.args], node) if plain else node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        counted = node.iter
        if isinstance(counted, ast.Call) and isinstance(counted.func, ast.Name) and counted.func.id == "range":
            node.iter = self._call("loop", counted.args, counted)
        return node


class FunctionRewriter(stock.FunctionRewriter):  # type: ignore[misc]
    """Compiles a kernel's rewritten source into its own module's namespace, and that of the function round it."""

    ast_transformer = Rewriter()

    def _compile_and_exec(self, transformed_ast: ast.Module) -> Any:
        code = compile(transformed_ast, filename=self.filename, mode="exec")
        scope = self.fn.__globals__
        scope.setdefault(_LANGUAGE, _Language)
        scope.setdefault(_OPERATOR, operator)
        enclosing = inspect.getclosurevars(self.fn).nonlocals
        if enclosing:
            scope = {**scope, **enclosing}
        local: dict[str, Any] = {**self.kwargs}
        exec(code, scope, local)
        return local[self.fn.__name__]


class _Signature:
    """How a kernel's arguments bind, worked out once."""

    def __init__(self, function: Any) -> None:
        self.parameters = inspect.signature(function).parameters
        self.names = list(self.parameters)
        self.defaults = {n: p.default for n, p in self.parameters.items() if p.default is not inspect.Parameter.empty}
        self.compile_time = {n for n, p in self.parameters.items() if _is_constexpr(p.annotation)}

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if len(args) > len(self.names):
            raise TypeError(f"takes {len(self.names)} arguments but {len(args)} were given")
        bound = {**self.defaults, **dict(zip(self.names, args, strict=False))}
        bound.update((name, value) for name, value in kwargs.items() if name in self.parameters)
        missing = [name for name in self.names if name not in bound]
        if missing:
            raise TypeError(f"missing arguments: {', '.join(missing)}")
        return {name: bound[name] for name in self.names}


def _is_constexpr(annotation: Any) -> bool:
    return annotation is constexpr or (isinstance(annotation, str) and annotation.split(".")[-1] == "constexpr")


_signatures: dict[Any, _Signature] = {}
_pointers: dict[str, Any] = {}


def _argument(value: Any) -> Any:
    """A launch argument as the kernel sees it."""
    if isinstance(value, bool):
        return tensor(Handle(np.array([value]), tl.int1), tl.int1)
    if isinstance(value, (int, np.integer)):
        dtype = SEMANTIC.to_tensor_type(int(value))
        return tensor(Handle(np.array([value], NUMPY_TYPES[dtype.name]), dtype), dtype)
    if isinstance(value, float):
        # The compiler passes every float as float32; a Python number would not take part in type promotion.
        return tensor(Handle(np.array([value], np.float32), tl.float32), tl.float32)
    if hasattr(value, "data_ptr"):
        spelling = mangle_type(value)
        dtype = _pointers.get(spelling)
        if dtype is None:
            dtype = _pointers[spelling] = tl.str_to_ty(spelling, None)
        return tensor(Handle(np.array([value.data_ptr()], ADDRESS), dtype), dtype)
    if isinstance(value, tuple):
        items = [_argument(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, TensorDescriptor):
        return _descriptor(value)
    return _unwrapped(value)


def _descriptor(value: Any) -> Any:
    strides = [_argument(stride) for stride in value.strides]
    strides[-1] = constexpr(1)
    made = SEMANTIC.make_tensor_descriptor(
        base=_argument(value.base),
        shape=[_argument(size) for size in value.shape],
        strides=strides,
        block_shape=[constexpr(size) for size in value.block_shape],
        padding_option=value.padding,
    )
    if hasattr(value, "round_f32_to_tf32"):
        made.handle.round_f32_to_tf32 = value.round_f32_to_tf32
    return made


def _on_cpu(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_on_cpu(item) for item in value)
    if isinstance(value, TensorDescriptor):
        value = value.base
    value = getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value
    return not isinstance(value, torch.Tensor) or value.device.type == "cpu"


def _launch(self: Any, *args: Any, **kwargs: Any) -> None:
    """One launch: programs in order of x, then y, then z."""
    signature = _signatures.get(self.fn)
    if signature is None:
        signature = _signatures[self.fn] = _Signature(self.fn)
    on_host = all(map(_on_cpu, args)) and all(map(_on_cpu, kwargs.values()))
    host_args, host_kwargs = (args, kwargs) if on_host else self._init_args_hst(args, kwargs)
    for hook in self.pre_run_hooks:
        hook(*host_args, **host_kwargs)
    bound = signature.bind(tuple(host_args), host_kwargs)
    grid = self.grid(bound) if callable(self.grid) else self.grid
    sizes = [operator.index(_unwrapped(size)) for size in grid] if isinstance(grid, (tuple, list)) else [int(grid)]
    if len(sizes) > 3:
        raise ValueError(f"grid={tuple(sizes)}: at most 3 dimensions")
    sizes += [1] * (3 - len(sizes))
    _run_programs(self.fn, signature, bound, sizes)
    if not on_host:
        self._restore_args_dev(args, host_args, kwargs, host_kwargs)


def _run_programs(function: Any, signature: _Signature, bound: dict[str, Any], sizes: list[int]) -> None:
    builder = BUILDER
    outer = (getattr(builder, "grid_dim", None), builder.grid_idx, builder.memory)
    builder.memory = Memory(bound)
    if builder.watch is not None:
        builder.watch.begin(function.__name__, builder.memory, (sizes[0], sizes[1], sizes[2]))
    try:
        with np.errstate(all="ignore"):
            arguments = {
                name: _unwrapped(value) if name in signature.compile_time else _argument(value)
                for name, value in bound.items()
            }
            builder.grid_dim = tuple(sizes)
            for x in range(sizes[0]):
                for y in range(sizes[1]):
                    for z in range(sizes[2]):
                        builder.grid_idx = (x, y, z)
                        function(**arguments)
    except (KernelFault, InterpreterError):
        raise
    except Exception as error:
        raise InterpreterError(f"{function.__name__}, program {builder.grid_idx}: {error!r}") from error
    finally:
        builder.grid_dim, builder.grid_idx, builder.memory = outer
        if builder.watch is not None:
            builder.watch.end()


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.rewrite()(*args, **kwargs)


def _run_first_config(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Autotuning measures time, which means nothing here: the first configuration runs."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    config = self.best_config = self.configs[0]
    if config.pre_hook is not None:
        config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
    try:
        return self.fn.run(*args, **kwargs, **config.all_kwargs())
    finally:
        self.nargs = None


def take_over() -> None:
    """Make this machine the one that runs every Triton kernel of the process."""
    stock.TensorHandle = Handle
    stock.interpreter_builder, stock.interpreter_semantic = BUILDER, SEMANTIC
    bind_language(SEMANTIC)
    bind_libdevice()
    stock.GridExecutor.__call__ = _launch
    stock.InterpretedFunction.__call__ = _call_device_function
    stock.FunctionRewriter._compile_and_exec = FunctionRewriter._compile_and_exec
    stock.FunctionRewriter.ast_transformer = FunctionRewriter.ast_transformer
    stock.InterpretedFunction.rewritten_fn.clear()
    Autotuner.run = _run_first_config
