"""How do the ranks of a group run as processes of their own, and what becomes of one that dies or hangs?

`answers` starts a process for every rank, joins them to a group (gloo on the CPU, NCCL or RCCL with a device each), hands
each its call and collects what they answer. Whatever happens, no process is left behind, and one that raises, dies or
says nothing in time becomes a `RanksError` that names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cases.memory import as_view, map_tensors, storage_bytes

SECONDS = 60.0
"""How long the ranks may take together, their start included, unless the caller says otherwise."""

# What the server that ranks are forked from imports once; a module that is missing is imported by nobody.
_PRELOADED = (
    "torch",
    "torch.distributed",
    "impl.dcp.combine_torch",
    "impl.dcp.combine_triton",
    "impl.dense_mla.decode_torch",
    "impl.dense_mla.decode_triton",
    "impl.executions.interpreter",
    # What torch imports when it is asked to poison new memory.
    "torch._inductor.config",
)


class RanksError(RuntimeError):
    """A rank raised, died or did not answer in time; the message says which and how."""


class _Sent(NamedTuple):
    """A tensor on its way to another process: its whole storage, so that strides and what lies between travel along."""

    storage: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Call(NamedTuple):
    """What one rank is to do: `function` of `module`, with these arguments, dataclasses of tensors among them."""

    module: str
    function: str
    arguments: tuple[Any, ...]


def _packed(value: Any) -> Any:
    def sent(tensor: torch.Tensor) -> Any:
        storage = storage_bytes(tensor).cpu().numpy().tobytes()
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return _Sent(storage, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)

    return map_tensors(value, sent)


def _unpacked(value: Any, device: str) -> Any:
    if isinstance(value, _Sent):
        storage = torch.frombuffer(bytearray(value.storage), dtype=torch.uint8) if value.storage else torch.empty(0)
        return as_view(storage.to(device), value.dtype, value.shape, value.strides, value.offset)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: _unpacked(held, device) for name, held in fields.items()})
    return tuple(_unpacked(part, device) for part in value) if isinstance(value, tuple) else value


def answers(calls: Sequence[Call], device: str, seconds: float = SECONDS) -> list[Any]:
    """What every rank answers to its call, tensors on `device`; raises `RanksError`.

    device: `cpu` or `cuda`; with `cuda`, rank r uses device r.
    """
    context = multiprocessing.get_context("forkserver")
    # Forked from a server that has imported torch, a rank starts in milliseconds.
    multiprocessing.set_forkserver_preload(list(_PRELOADED))
    world, deadline = len(calls), time.monotonic() + seconds
    processes: list[Any] = []
    connections: list[multiprocessing.connection.Connection] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank, call in enumerate(calls):
                ours, theirs = context.Pipe()
                place = _Place(rank, world, str(Path(folder) / "meeting"), device, seconds)
                process = context.Process(target=_serve, args=(theirs, place), daemon=True)
                with _bare_main():
                    process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
                ours.send_bytes(pickle.dumps(call._replace(arguments=_packed(call.arguments))))
            return _collected(processes, connections, device, deadline, seconds)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise RanksError(f"a rank of {world} ended before it took its call") from error
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join(10)
            for connection in connections:
                connection.close()


@contextlib.contextmanager
def _bare_main() -> Iterator[None]:
    """For the duration of a `with`, a main module without a file: a new process imports its parent's, which costs seconds."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _Place(NamedTuple):
    """A rank's place in its group."""

    rank: int
    world: int
    meeting: str
    device: str
    seconds: float


def _collected(
    processes: Sequence[Any], connections: Sequence[Any], device: str, deadline: float, seconds: float
) -> list[Any]:
    world = len(processes)
    found: dict[int, Any] = {}
    while len(found) < world:
        waiting = [rank for rank in range(world) if rank not in found]
        ready = multiprocessing.connection.wait(
            [connections[rank] for rank in waiting], timeout=max(0.0, deadline - time.monotonic())
        )
        if not ready:
            names = ", ".join(map(str, waiting))
            raise RanksError(f"rank {names} of {world} did not answer within {seconds:g} seconds")
        for rank in waiting:
            if connections[rank] in ready:
                ok, value = _received(rank, processes, connections)
                # The others' collectives fail for want of this rank: the first to fail is the one to name.
                if not ok:
                    raise RanksError(f"rank {rank} of {world} raised {value}")
                found[rank] = value
    return [_unpacked(found[rank], device) for rank in range(world)]


def _received(rank: int, processes: Sequence[Any], connections: Sequence[Any]) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pickle.loads(connections[rank].recv_bytes())
        return answer
    except (EOFError, ConnectionResetError):
        processes[rank].join(10)
        code = processes[rank].exitcode
        raise RanksError(f"rank {rank} of {len(processes)} ended with exit code {code} before it answered") from None


def _serve(connection: Any, place: _Place) -> None:
    """The life of a rank: join the group, answer one call, leave."""
    import torch.distributed as distributed

    try:
        call: Call = pickle.loads(connection.recv_bytes())
        device = place.device if place.device == "cpu" else f"{place.device}:{place.rank}"
        if device != "cpu":
            torch.cuda.set_device(place.rank)
        torch.set_num_threads(1)
        # New memory holds NaN until it is written, as in the process that asks.
        torch.use_deterministic_algorithms(True, warn_only=True)
        distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl", init_method=f"file://{place.meeting}", rank=place.rank,
            world_size=place.world, timeout=datetime.timedelta(seconds=place.seconds),
        )  # fmt: skip
        answer = _function(call, device)(*_unpacked(call.arguments, device))
        message: tuple[bool, Any] = (True, _packed(answer))
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        first = (str(error).strip() or "no message").splitlines()[0]
        message = (False, f"{type(error).__name__}: {first}{where}")
    connection.send_bytes(pickle.dumps(message))
    # What the library does at a regular end (threads, sockets of ranks that are gone) may hang or complain.
    os._exit(0)


def _function(call: Call, device: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(call.module), call.function)
    if device == "cpu" and "triton" in sys.modules:
        importlib.import_module("impl.executions.interpreter").install()
    return function
