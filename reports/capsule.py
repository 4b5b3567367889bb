"""How does a failing case travel to another machine?

A capsule is one safetensors file: the whole storages behind the case's inputs, the suspect's outputs, and the
record, as JSON in the metadata. Reading one runs no code of whoever made it.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cases import op_module
from cases.case import CaseError, parse
from cases.memory import as_view, is_vast, map_tensors, named_tensors, storage_bytes
from reports.execute import Trial
from reports.record import Record

CAPSULE_SCHEMA = 1
# Larger trials are not kept by a sweep; their case ids build them anywhere.
MOST_BYTES = 32 * 2**20
# What a capsule leaves free on the disk, for the records.
_LEFT_FREE = 64 * 2**20
_HEAD = "mla-oracle"


class CapsuleError(ValueError):
    """A file that is no capsule, or one that this version cannot replay; the message says what would be right."""


class View(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a tensor lies in its storage: `offset` in bytes, `stride` in elements."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a capsule says about itself."""

    capsule: int
    record: Record
    inputs: dict[str, View]


def write_capsule(path: Path, trial: Trial) -> Path:
    """Keep a trial in a new file; raises `CapsuleError` rather than overwrite one, or when there are no inputs."""
    if path.exists():
        raise CapsuleError(f"{path}: exists already; a capsule is never overwritten")
    if trial.inputs is None:
        raise CapsuleError(f"{trial.record.case}: {trial.record.status}, so there are no inputs to keep")
    vast = [name for name, tensor in named_tensors(trial.inputs) if is_vast(tensor)]
    if vast:
        raise CapsuleError(
            f"{trial.record.case}: {vast[0]} spans gigabytes and is not kept; the case id builds it anywhere"
        )
    views = {
        name: View(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()) * tensor.element_size(),
        )
        for name, tensor in named_tensors(trial.inputs)
    }
    tensors = {f"input {name}": storage_bytes(tensor).clone() for name, tensor in named_tensors(trial.inputs)}
    if trial.outputs is not None:
        tensors |= {f"output {name}": tensor.clone().contiguous() for name, tensor in named_tensors(trial.outputs)}
    head = Head(capsule=CAPSULE_SCHEMA, record=trial.record, inputs=views)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path), metadata={_HEAD: msgspec.json.encode(head).decode()})
    return path


def kept_capsule(path: Path, trial: Trial, most: int = MOST_BYTES) -> bool:
    """Whether the trial is kept in this new file now: never half of it, and never by raising.

    It is not where there are no inputs, where they are vast or larger than `most` bytes, or where the disk is nearly full.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        size = _size(trial)
        if size is None or size > most or shutil.disk_usage(path.parent).free < size + _LEFT_FREE:
            return False
        write_capsule(part, trial)
        part.rename(path)
    except Exception:
        # Whatever went wrong with it, a capsule is a help, and the record must be written.
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        return False
    return True


def _size(trial: Trial) -> int | None:
    """The bytes of a trial's capsule; None when there can be none."""
    if trial.inputs is None or any(is_vast(tensor) for _, tensor in named_tensors(trial.inputs)):
        return None
    stored = sum(storage_bytes(tensor).numel() for _, tensor in named_tensors(trial.inputs))
    if trial.outputs is not None:
        stored += sum(tensor.numel() * tensor.element_size() for _, tensor in named_tensors(trial.outputs))
    return stored


def read_capsule(path: Path) -> tuple[Record, Any]:
    """The record and the inputs of a capsule, guards and strides included; raises `CapsuleError`.

    What is not a tensor (scales, flags) comes from the case id, which builds the same values everywhere.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            head = _head(path, file.metadata() or {})
            stored = {name: file.get_tensor(f"input {name}") for name in head.inputs}
    except (OSError, SafetensorError) as error:
        raise CapsuleError(f"{path}: {error}; a capsule is a safetensors file that mla-oracle wrote") from None
    try:
        case = parse(head.record.case)
    except CaseError as error:
        raise CapsuleError(f"{path}: its case cannot be read by this version: {error}") from None
    built = op_module("cases", case.op).build(case)
    names = [name for name, _ in named_tensors(built)]
    if set(names) != set(stored):
        raise CapsuleError(
            f"{path}: holds the inputs {', '.join(stored)}, but {case.op} of this version takes {', '.join(names)}"
        )
    views = {
        id(tensor): _restored(path, name, stored[name], head.inputs[name]) for name, tensor in named_tensors(built)
    }
    return head.record, map_tensors(built, lambda tensor: views[id(tensor)])


def _restored(path: Path, name: str, storage: torch.Tensor, view: View) -> torch.Tensor:
    dtype = getattr(torch, view.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CapsuleError(f"{path}: {name} has dtype {view.dtype!r}, which torch {torch.__version__} does not know")
    try:
        return as_view(storage, dtype, view.shape, view.stride, view.offset)
    except RuntimeError as error:
        raise CapsuleError(f"{path}: {name} does not fit its storage: {str(error).splitlines()[0]}") from None


def _head(path: Path, metadata: dict[str, str]) -> Head:
    if _HEAD not in metadata:
        raise CapsuleError(f"{path}: a safetensors file, but no capsule: its metadata has no {_HEAD!r}")
    try:
        schema = json.loads(metadata[_HEAD]).get("capsule")
    except (ValueError, AttributeError):
        raise CapsuleError(f"{path}: its {_HEAD!r} metadata is not a JSON object") from None
    if schema != CAPSULE_SCHEMA:
        raise CapsuleError(f"{path}: capsule schema {schema}, but this version of mla-oracle reads {CAPSULE_SCHEMA}")
    try:
        return msgspec.json.decode(metadata[_HEAD], type=Head)
    except msgspec.DecodeError as error:
        raise CapsuleError(f"{path}: {error}; it should be a capsule as `mla-oracle replay --save` writes it") from None
