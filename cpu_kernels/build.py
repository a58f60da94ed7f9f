"""Builds the kernel library with the machine's compiler and keeps it in a cache folder.

A library's name tells what it was built from and for, so an old one is never taken for a new one.
Whoever needs a missing one builds it under a lock of the folder, which the system releases when
its holder dies (torch.utils.cpp_extension's lock file stays behind and blocks everyone), under a
private name, and renames it when complete. Its last bytes are a digest of all the others: a file
that was cut or changed is built again instead of crashing the process that maps it.

Does not load anything and imports no torch: an image is prepared without it.
"""

from __future__ import annotations

import fcntl
import hashlib
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from core.errors import ConfigError
from cpu_kernels.cpu_level import TARGET_FLAGS, CpuLevel, levels_here, levels_to_build

SOURCES = Path(__file__).resolve().parent / "csrc"
COMPILERS = ("g++", "clang++")
LANGUAGE_FLAGS = (
    "-std=c++20", "-pthread", "-fno-strict-aliasing", "-ffp-contract=off", "-Wno-psabi",
)  # fmt: skip
"""The kernels have threads of their own: a second OpenMP runtime beside torch's would fight it for
the cores. contract: a product and a sum that the compiler may fuse are rounded once in one place
and twice in another. psabi: no vector crosses the library's face."""
LIBRARY_FLAGS = ("-O3", "-shared", "-fPIC")
"""No -ffast-math: a NaN must stay one, and sums keep their order."""
COMPILE_TIMEOUT_S = 600.0
DIGEST_BYTES = 32
ERROR_LINES = 3

Note = Callable[[str], None]
"""Told what is being done, for people who wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBuild:
    """What one library is built from and for."""

    sources: Path
    """Folder of *.cpp and *.h files."""
    level: CpuLevel

    @property
    def flags(self) -> tuple[str, ...]:
        return (*LANGUAGE_FLAGS, *LIBRARY_FLAGS, *TARGET_FLAGS[self.level])

    @property
    def file_name(self) -> str:
        """With a hash of everything that decides what is in the file, except the compiler: where
        there is none, what another image built must be found."""
        parts = [" ".join(self.flags), platform.machine(), *platform.libc_ver()]
        key = hashlib.sha256("\n".join(parts).encode())
        for path in sorted([*self.sources.glob("*.cpp"), *self.sources.glob("*.h")]):
            content = path.read_bytes()
            key.update(f"\n{path.name} {len(content)}\n".encode() + content)
        return f"kernels-{self.level}-{platform.machine()}-{key.hexdigest()[:16]}.so"


def cache_folder(named: str | None) -> Path:
    """EngineConfig.kernel_cache as a path."""
    return Path(named) if named else Path.home() / ".cache" / "twostroke" / "kernels"


def build_ahead(
    level: str | None, *, cache: str | None, sources: Path = SOURCES, note: Note
) -> None:
    """Fill the cache for `level`, for "all" that this machine's compiler can build, or (None) for
    the best of this CPU. Raises ConfigError."""
    wanted = levels_to_build() if level == "all" else (CpuLevel(level or levels_here()[0]),)
    try:
        folder = cache_folder(cache)
    except RuntimeError as error:  # this user has no home
        raise ConfigError(
            f"{error}: say in XDG_CACHE_HOME where to keep the CPU kernels"
        ) from error
    try:
        for each in wanted:
            built_library(KernelBuild(sources=sources, level=each), folder, note)
    except OSError as error:
        raise ConfigError(f"{folder} cannot keep the CPU kernels: {error.strerror}") from error


def built_library(build: KernelBuild, folder: Path, note: Note) -> Path:
    """The library's path in `folder`, built now where it is missing or damaged.

    Raises ConfigError when there is no compiler or it fails, OSError when the folder cannot be
    used.
    """
    path = folder / build.file_name
    if is_intact(path):
        note(f"CPU kernels ({build.level}), cached")
        return path
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(folder / "lock", note):
        if not is_intact(path):  # else another process built it while this one waited
            _remove_unfinished(path)
            _build(build, path, note)
    return path


def is_intact(path: Path) -> bool:
    """Whether a library is there and is what was once written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return _digest(content[:-DIGEST_BYTES]) == content[-DIGEST_BYTES:]


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


@contextmanager
def _locked(path: Path, note: Note) -> Iterator[None]:
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("waiting for the CPU kernels that another process builds")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_unfinished(path: Path) -> None:
    """What builders that were killed left behind. Only under the lock: nobody else builds now."""
    for left in path.parent.glob(f"{path.name}.*"):
        shutil.rmtree(left, ignore_errors=True)  # an orphaned compiler may still write there


def _build(build: KernelBuild, path: Path, note: Note) -> None:
    compiler = find_compiler()
    note(f"building CPU kernels ({build.level}) with {Path(compiler).name}: 10 to 30 s")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as private:
        unfinished = Path(private) / path.name
        _compile([compiler, *build.flags, "-o", str(unfinished)], build.sources)
        with unfinished.open("ab") as file:
            file.write(_digest(unfinished.read_bytes()))
        unfinished.replace(path)
    took = time.monotonic() - began
    note(f"CPU kernels ({build.level}) built in {took:.1f} s into {path.parent}")


def find_compiler() -> str:
    """Raises ConfigError when there is none on the PATH."""
    found = (shutil.which(name) for name in COMPILERS)
    compiler = next(filter(None, found), None)
    if compiler is None:
        raise ConfigError(f"no C++ compiler found (looked for {' and '.join(COMPILERS)})")
    return compiler


def _compile(command: list[str], sources: Path) -> None:
    files = [str(path) for path in sorted(sources.glob("*.cpp"))]
    try:
        result = subprocess.run(
            [*command, *files], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} took longer than {COMPILE_TIMEOUT_S:g} s") from None
    if result.returncode:
        raise ConfigError(
            f"{command[0]} ended with exit code {result.returncode}: {_reason(result.stderr)}"
        )


def _reason(output: str) -> str:
    """The first lines that name an error; the first lines at all in other languages."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    return "; ".join((errors or lines)[:ERROR_LINES]) or "it says no more"
