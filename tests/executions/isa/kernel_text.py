"""Writes the assembly text of a kernel round a few lines of its code, as LLVM prints it, and launches it."""

from __future__ import annotations

from typing import Any

import numpy as np

from impl.executions.isa import machine
from impl.executions.isa.assembly import read

FILE = "watched.py"
ARGUMENTS = "arguments of 32 bytes lie at s[0:1]; s2, s3 and s4 number the workgroup, v0 the lane among the workgroup's"


def kernel_text(
    code: str, arch: str = "gfx942", lds: int = 0, scratch: int = 0, directives: str = "", metadata: str = ""
) -> str:
    """A kernel named `watched`. Line number N of `code` is line N of watched.py; of the registers `ARGUMENTS` speaks."""
    lines = []
    for number, line in enumerate(code.strip("\n").splitlines(), 1):
        word = line.strip()
        if word:
            lines.append(word if word.endswith(":") else f"\t.loc\t1 {number} 5\n\t{word}")
    return "\n".join([
        f'\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"',
        "\t.amdhsa_code_object_version 5",
        "\t.text",
        "\t.globl\twatched                         ; -- Begin function watched",
        "\t.p2align\t8",
        "\t.type\twatched,@function",
        "watched:                                ; @watched",
        ".Lfunc_begin0:",
        "\t.cfi_sections .debug_frame",
        "\t.cfi_startproc",
        f'\t.file\t1 "/kernels" "{FILE}"',
        *lines,
        "\ts_endpgm",
        ".Lfunc_end0:",
        "\t.size\twatched, .Lfunc_end0-watched",
        "\t.cfi_endproc",
        '\t.section\t.rodata,"a",@progbits',
        "\t.p2align\t6, 0x0",
        "\t.amdhsa_kernel watched",
        f"\t\t.amdhsa_group_segment_fixed_size {lds}",
        f"\t\t.amdhsa_private_segment_fixed_size {scratch}",
        "\t\t.amdhsa_kernarg_size 32",
        "\t\t.amdhsa_user_sgpr_count 2",
        "\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1",
        *(f"\t\t.amdhsa_system_sgpr_workgroup_id_{axis} 1" for axis in "xyz"),
        *(f"\t\t{line.strip()}" for line in directives.splitlines() if line.strip()),
        "\t.end_amdhsa_kernel",
        "\t.text",
        '\t.section\t".note.GNU-stack","",@progbits',
        *(["\t.amdgpu_metadata", metadata, "\t.end_amdgpu_metadata"] if metadata else []),
        "",
    ])  # fmt: skip


def launched(
    code: str,
    *,
    arch: str = "gfx942",
    waves: int = 1,
    grid: tuple[int, int, int] = (1, 1, 1),
    size: int = 1024,
    lds: int = 0,
    scratch: int = 0,
    shared: int = 0,
    limit: int = 100_000,
    directives: str = "",
) -> np.ndarray[Any, Any]:
    """The uint32 words of `size` bytes of memory, zero before, that a kernel was given as its only argument."""
    memory = np.zeros(size // 4, np.uint32)
    kernel = machine.prepare(read(kernel_text(code, arch, lds, scratch, directives)))
    start = memory.ctypes.data
    machine.launch(kernel, [("*i32", start)], [(start, start + size)], grid, waves, shared, limit)
    return memory
