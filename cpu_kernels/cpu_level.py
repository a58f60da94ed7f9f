"""Which instructions the kernels may use here: what the CPU has and the flags that ask for it."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


class CpuLevel(StrEnum):
    """Best first."""

    AMX = "amx"
    AVX512 = "avx512"
    AVX2 = "avx2"
    PLAIN = "plain"


_X86_64_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_AVX512 = _X86_64_V3 | {
    "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16",
}  # fmt: skip
_NEEDED: Mapping[CpuLevel, frozenset[str]] = {
    CpuLevel.AMX: _AVX512 | {"amx_tile", "amx_int8", "amx_bf16"},
    CpuLevel.AVX512: _AVX512,
    CpuLevel.AVX2: _X86_64_V3,
    CpuLevel.PLAIN: frozenset(),
}
"""As Linux spells them in /proc/cpuinfo."""

_AVX512_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")
TARGET_FLAGS: Mapping[CpuLevel, tuple[str, ...]] = {
    CpuLevel.AMX: (*_AVX512_FLAGS, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    CpuLevel.AVX512: _AVX512_FLAGS,
    CpuLevel.AVX2: ("-march=x86-64-v3",),
    CpuLevel.PLAIN: (),
}
"""For g++ (amx: 11 or later) and clang++ alike; plain is the oldest CPU of the machine's
architecture."""


def levels_of(cpu_info: str) -> tuple[CpuLevel, ...]:
    """Those a CPU can run, best first, by the text of its /proc/cpuinfo."""
    line = re.search(r"^flags\s*:(.*)$", cpu_info, re.MULTILINE)
    flags = set(line[1].split()) if line else set()
    return tuple(level for level in CpuLevel if _NEEDED[level] <= flags)


def levels_here() -> tuple[CpuLevel, ...]:
    """Those this CPU can run, best first; where Linux does not tell, plain alone."""
    return levels_of(CPU_INFO.read_text(encoding="utf-8") if CPU_INFO.is_file() else "")


def levels_to_build() -> tuple[CpuLevel, ...]:
    """Those a compiler of this machine can build for, whatever its own CPU can run."""
    return tuple(CpuLevel) if platform.machine() == "x86_64" else (CpuLevel.PLAIN,)
