"""Loads the kernel library: the best level this CPU can run, built where it is not cached. A level
that cannot be had, or that the system refuses, gives way to the next."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import tempfile
import threading
from pathlib import Path

from core.errors import ConfigError
from cpu_kernels.build import SOURCES, KernelBuild, Note, built_library, cache_folder
from cpu_kernels.cpu_level import CpuLevel, levels_here

logger = logging.getLogger(__name__)

_warning = threading.Lock()


def choose_library(kernels: str, *, cache: str | None = None, note: Note) -> ctypes.CDLL | None:
    """The library that EngineConfig.kernels asks for; None: compute with torch.

    "native" raises ConfigError where there is no library to be had, "auto" warns once.
    """
    if kernels == "torch":
        return None
    try:
        return load_library(cache=cache, note=note)
    except ConfigError as error:
        if kernels == "native":
            raise
        note("no CPU kernels, computing with torch")
        _warn_once(
            "the CPU kernels cannot be used: %s. Prompts are read and answers written with torch "
            "instead, several times slower. Install a C++ compiler (Debian, Ubuntu: `apt install "
            "g++`) or run `twostroke build-kernels` where there is one; `--kernels torch` stops "
            "this warning.",
            error.message,
        )
        return None


def _warn_once(text: str, *arguments: str) -> None:
    with _warning:  # functools.cache alone lets two threads in
        _warn_first(text, *arguments)


@functools.cache  # the engines of a process share its machine: one warning is enough
def _warn_first(text: str, *arguments: str) -> None:
    logger.warning(text, *arguments)


def load_library(
    level: CpuLevel | None = None,
    *,
    cache: str | None = None,
    sources: Path = SOURCES,
    note: Note,
) -> ctypes.CDLL:
    """The kernels at `level` (None: the best that can be had), out of `cache` (EngineConfig's
    kernel_cache) or built now: into that folder, or for this process alone where it cannot be
    used. Raises ConfigError with the reason when that fails: for the best level, where all do.
    """
    levels = levels_here()
    if level is not None and level not in levels:
        raise ConfigError(f"this CPU cannot run kernels of level {level}, only {', '.join(levels)}")
    errors = []
    for each in levels if level is None else (level,):
        try:
            library = _load_level(KernelBuild(sources=sources, level=each), cache, note)
        except ConfigError as error:
            errors.append(error)
            continue
        if errors:
            _warn_once(
                "the best CPU kernels cannot be used: %s. Those of level %s are used instead.",
                errors[0].message,
                each,
            )
        return library
    raise errors[0]


def _load_level(build: KernelBuild, cache: str | None, note: Note) -> ctypes.CDLL:
    library = _load_built(build, cache, note)
    if build.level is CpuLevel.AMX and (code := library.ts_prepare()):
        reason = "their tiles multiply wrongly" if code < 0 else f"refused: {os.strerror(code)}"
        raise ConfigError(f"kernels of level {build.level}: {reason}")
    return library


def _load_built(build: KernelBuild, cache: str | None, note: Note) -> ctypes.CDLL:
    try:
        folder = cache_folder(cache)
    except RuntimeError as error:  # this user has no home
        note(f"{error}: building the CPU kernels for now only")
        return _load_unkept(build, note)
    try:
        path = built_library(build, folder, note)
    except OSError as error:
        note(f"{folder} cannot keep the CPU kernels ({error.strerror}), building them for now only")
        return _load_unkept(build, note)
    return _load(path)


def _load_unkept(build: KernelBuild, note: Note) -> ctypes.CDLL:
    """What is loaded stays in memory when its file goes."""
    try:
        with tempfile.TemporaryDirectory(prefix="twostroke-kernels-") as private:
            return _load(built_library(build, Path(private), note))
    except OSError as error:
        raise ConfigError(f"no folder to build the CPU kernels in: {error}") from error


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path.resolve()))  # a name without a slash would be searched for
    except OSError as error:
        raise ConfigError(f"the CPU kernels cannot be loaded: {error}") from error


def check(failed: int) -> None:
    """Of what a kernel returns."""
    if failed:
        raise MemoryError("there is no memory, or there are no threads, for the CPU kernels")
