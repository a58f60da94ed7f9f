"""cpu_kernels.build and library: built once with a real compiler, found again, never half."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.config import EngineConfig
from core.errors import ConfigError
from cpu_kernels.build import KernelBuild, build_ahead, built_library, cache_folder, is_intact
from cpu_kernels.cpu_level import CpuLevel, levels_here, levels_of, levels_to_build
from cpu_kernels.library import _warn_first, choose_library, load_library
from deploy.cli import main
from deploy.config_file import engine_config, kernel_cache, load_settings
from deploy.model_source import ResolvedModel

HEADER = "inline int answer() { return 42; }\n"
KERNELS = """\
#include "answer.h"
extern "C" int ts_answer() { return answer(); }
extern "C" int ts_prepare() { return 0; }
"""
V4 = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave avx512f avx512bw avx512cd avx512dq avx512vl"
SAPPHIRE_RAPIDS = f"{V4} avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8"

BUILDER = """\
import sys
from pathlib import Path
from cpu_kernels.build import KernelBuild, built_library
from cpu_kernels.cpu_level import CpuLevel
build = KernelBuild(sources=Path(sys.argv[1]), level=CpuLevel.PLAIN)
print(built_library(build, Path(sys.argv[2]), lambda text: print(text, flush=True)))
"""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.h").write_text(HEADER)
    (folder / "kernels.cpp").write_text(KERNELS)
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def notes():
    return []


@pytest.fixture
def load(sources, cache, notes):
    def load(folder=cache):
        notes.clear()
        return load_library(CpuLevel.PLAIN, cache=str(folder), sources=sources, note=notes.append)

    return load


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Puts a g++ in front of the real one: a shell script; $REAL is the real one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("REAL", shutil.which("g++"))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def script(text):
        path = folder / "g++"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    return script


@pytest.fixture
def builder(sources, cache):
    """Starts a process that builds into the cache."""
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", BUILDER, sources, cache], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def libraries(folder):
    return sorted(folder.glob("*.so"))


def wait_for(path):
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)


# -- levels


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        (SAPPHIRE_RAPIDS, CpuLevel.AMX),
        (SAPPHIRE_RAPIDS.replace("amx_tile", ""), CpuLevel.AVX512),
        (f"{V4} avx512_vnni avx512_bf16", CpuLevel.AVX512),
        (f"{V4} avx512_vnni", CpuLevel.AVX2),  # Cascade Lake: no bfloat16
        (V4.replace("bmi2 ", ""), CpuLevel.PLAIN),
        ("sse4_2 avx", CpuLevel.PLAIN),
    ],
)
def test_best_level_of_a_cpu(flags, best):
    assert levels_of(f"processor\t: 0\nflags\t\t: fpu {flags} sse\n")[0] == best


def test_what_a_cpu_can_run_includes_all_lower_levels():
    assert levels_of(f"flags : {SAPPHIRE_RAPIDS}") == tuple(CpuLevel)


@pytest.mark.parametrize("cpu_info", ["", "processor : 0\nFeatures : fp asimd bf16 i8mm\n"])
def test_other_architectures_and_systems_are_plain(cpu_info):
    assert levels_of(cpu_info) == (CpuLevel.PLAIN,)


@pytest.mark.parametrize("level", levels_to_build())
def test_every_level_compiles_and_those_of_this_cpu_run(sources, cache, notes, level):
    if level in levels_here():
        library = load_library(level, cache=str(cache), sources=sources, note=notes.append)
        assert library.ts_answer() == 42
    else:
        build = KernelBuild(sources=sources, level=level)
        assert is_intact(built_library(build, cache, notes.append))


# -- the cache


def test_first_built_then_cached(load, cache, notes):
    assert load().ts_answer() == 42
    assert notes[0] == "building CPU kernels (plain) with g++: 10 to 30 s"
    assert notes[1].startswith("CPU kernels (plain) built in ")
    assert notes[1].endswith(f" s into {cache}")
    assert load().ts_answer() == 42
    assert notes == ["CPU kernels (plain), cached"]


def test_nothing_but_library_and_lock_stays(load, cache):
    load()
    assert {path.name for path in cache.iterdir()} == {"lock", libraries(cache)[0].name}


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("kernels.cpp", "return answer();", "return answer() + 1;"), ("answer.h", "42", "43")],
)
def test_a_changed_source_is_built_anew(load, sources, cache, name, before, after):
    load()
    path = sources / name
    path.write_text(path.read_text().replace(before, after))
    assert load().ts_answer() == 43
    assert len(libraries(cache)) == 2


def test_each_level_has_a_name_of_its_own(sources):
    names = {KernelBuild(sources=sources, level=level).file_name for level in CpuLevel}
    assert len(names) == len(CpuLevel)


def test_moving_text_between_files_changes_the_name(sources):
    before = KernelBuild(sources=sources, level=CpuLevel.PLAIN).file_name
    (sources / "answer.h").rename(sources / "other.h")
    assert KernelBuild(sources=sources, level=CpuLevel.PLAIN).file_name != before


@pytest.mark.parametrize("damage", [lambda text: text[:5000], lambda text: b"", bytes.swapcase])
def test_a_damaged_file_is_built_again(load, cache, notes, damage):
    load()
    (path,) = libraries(cache)
    whole = path.read_bytes()
    path.unlink()  # this process has it mapped: only a new file may be damaged
    path.write_bytes(damage(whole))
    assert load().ts_answer() == 42
    assert "building" in notes[0]
    assert is_intact(path)


def test_a_cached_library_needs_neither_lock_nor_compiler(load, cache, monkeypatch):
    load()
    monkeypatch.setenv("PATH", "")
    with (cache / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert load().ts_answer() == 42


def test_a_folder_that_cannot_be_used_is_told_and_done_without(load, tmp_path, notes):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "kernels"
    assert load(folder).ts_answer() == 42
    assert notes[0] == (
        f"{folder} cannot keep the CPU kernels (Not a directory), building them for now only"
    )
    private = Path(notes[-1].rpartition(" into ")[2])
    assert not private.exists()


# -- several processes


def test_two_processes_at_once_build_once(compiler, builder, cache, tmp_path):
    calls, gate = tmp_path / "calls", tmp_path / "gate"
    compiler(f'echo call >> {calls}; until [ -e {gate} ]; do sleep 0.02; done\nexec "$REAL" "$@"')
    first = builder()
    wait_for(calls)
    second = builder()
    told = second.stdout.readline()
    gate.touch()
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in (first, second)]
    assert told == "waiting for the CPU kernels that another process builds\n"
    assert (first.returncode, second.returncode) == (0, 0)
    assert calls.read_text().split() == ["call"]
    assert outputs[0][-1] == outputs[1][-1] == str(libraries(cache)[0])


def test_a_killed_builder_leaves_nothing_that_blocks(compiler, builder, load, cache, tmp_path):
    pid = tmp_path / "pid"
    compiler(f"echo $$ > {pid}; exec sleep 60")
    process = builder()
    wait_for(pid)
    process.kill()
    process.wait()
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert [path.name for path in cache.iterdir() if path.is_dir()]
    compiler('exec "$REAL" "$@"')
    assert load().ts_answer() == 42
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


# -- without a compiler, or with a bad one


def test_an_error_of_the_compiler_is_quoted(load, sources, cache):
    (sources / "kernels.cpp").write_text("int broken() { return missing_name; }\n")
    with pytest.raises(ConfigError, match=r"exit code 1: .*missing_name") as caught:
        load()
    assert len(caught.value.message.splitlines()) == 1
    assert libraries(cache) == []


def test_an_unknown_flag_or_a_silent_failure_is_told_too(load, compiler):
    compiler("exit 7")
    with pytest.raises(ConfigError, match="exit code 7: it says no more"):
        load()


def test_what_does_not_load_is_an_error_with_the_reason(load, sources):
    (sources / "kernels.cpp").write_text(
        'extern "C" int lost(); extern "C" int ts() { return lost(); }\n'
    )
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*undefined symbol: lost"):
        load()


def test_a_level_beyond_this_cpu_is_refused(monkeypatch, tmp_path, sources):
    monkeypatch.setattr("cpu_kernels.cpu_level.CPU_INFO", tmp_path / "absent")
    with pytest.raises(ConfigError, match="cannot run kernels of level avx2, only plain"):
        load_library(CpuLevel.AVX2, sources=sources, note=print)


# -- a level that cannot be had


@pytest.fixture
def sapphire_rapids(tmp_path, monkeypatch):
    """This CPU says that it has AMX."""
    path = tmp_path / "cpuinfo"
    path.write_text(f"flags\t\t: fpu {SAPPHIRE_RAPIDS}\n")
    monkeypatch.setattr("cpu_kernels.cpu_level.CPU_INFO", path)


@pytest.fixture
def log(caplog):
    """What is warned of in this test: what others have warned of before is forgotten."""
    _warn_first.cache_clear()
    yield caplog
    _warn_first.cache_clear()


@pytest.fixture
def prepares_with(sources):
    """Kernels whose ts_prepare returns this."""

    def prepares_with(code):
        text = KERNELS.replace("ts_prepare() { return 0;", f"ts_prepare() {{ return {code};")
        (sources / "kernels.cpp").write_text(text)

    return prepares_with


needs_no_amx = pytest.mark.skipif(
    levels_here()[0] is not CpuLevel.AVX512, reason="needs a CPU with AVX-512 and without AMX"
)


@needs_no_amx
def test_linux_refuses_tiles_where_there_are_none(sapphire_rapids, notes, log):
    """The real kernels ask the real system."""
    for _ in range(2):
        library = load_library(note=notes.append)
        assert library.ts_prepare() == 0  # which those of level amx would not say
    assert log.messages == [
        "the best CPU kernels cannot be used: kernels of level amx: refused: Operation not "
        "supported. Those of level avx512 are used instead."
    ]
    with pytest.raises(ConfigError, match="level amx: refused: Operation not supported"):
        load_library(CpuLevel.AMX, note=notes.append)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(1, "refused: Operation not permitted"), (-1, "their tiles multiply wrongly")],
)
@needs_no_amx
def test_a_level_that_does_not_work_gives_way_to_the_next(
    code, reason, prepares_with, sapphire_rapids, sources, cache, notes, log
):
    prepares_with(code)
    assert load_library(cache=str(cache), sources=sources, note=notes.append).ts_answer() == 42
    assert len(log.messages) == 1
    assert f"{reason}. Those of level avx512" in log.messages[0]


@needs_no_amx
def test_a_level_that_works_is_used(prepares_with, sapphire_rapids, sources, cache, notes):
    prepares_with(0)
    assert load_library(cache=str(cache), sources=sources, note=notes.append).ts_answer() == 42
    assert notes[0].startswith("building CPU kernels (amx)")
    assert len(libraries(cache)) == 1


def test_what_was_built_for_less_is_used_where_nothing_can_be_built(
    load, sources, cache, notes, monkeypatch, log
):
    load()
    if levels_here() == (CpuLevel.PLAIN,):
        pytest.skip("this CPU has no better level")
    monkeypatch.setenv("PATH", "")
    assert load_library(cache=str(cache), sources=sources, note=notes.append).ts_answer() == 42
    assert len(log.messages) == 1
    assert "no C++ compiler found" in log.messages[0]
    assert "level plain" in log.messages[0]


def test_where_no_level_can_be_had_the_best_ones_reason_is_told(sources, cache, notes):
    (sources / "kernels.cpp").write_text("#error no kernels\n")
    with pytest.raises(ConfigError, match="no kernels"):
        load_library(cache=str(cache), sources=sources, note=notes.append)


def test_native_without_a_compiler_is_an_error(monkeypatch, cache):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler found"):
        choose_library("native", cache=str(cache), note=print)


def test_auto_without_a_compiler_warns_once_per_process(cache):
    program = (
        "from cpu_kernels.library import choose_library\n"
        f"print([choose_library('auto', cache={str(cache)!r}, note=print) for _ in range(2)])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PATH": ""}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout.splitlines()[-1] == "[None, None]"
    assert "no CPU kernels, computing with torch" in result.stdout
    assert result.stderr.count("cannot be used") == 1
    assert "apt install g++" in result.stderr


def test_torch_asks_for_no_library(cache, notes):
    assert choose_library("torch", cache=str(cache), note=notes.append) is None
    assert notes == []
    assert not cache.exists()


def test_other_words_are_refused():
    with pytest.raises(ConfigError, match="kernels must be auto, native, torch, not 'c'"):
        EngineConfig(model_path="m", kernels="c")


# -- what must not be in it


def test_the_library_brings_no_openmp_runtime_to_fight_with_that_of_torch(load, sources, cache):
    loop = "void ts_loop() {\n#pragma omp parallel\n  answer();\n}\n"
    (sources / "kernels.cpp").write_text(f'#include "answer.h"\n{loop}')
    load()
    assert b"omp.so" not in libraries(cache)[0].read_bytes()


# -- building ahead


def test_build_ahead_fills_the_folder_that_a_worker_looks_into(sources, cache, load, monkeypatch):
    build_ahead("all", cache=str(cache), sources=sources, note=print)
    assert len(libraries(cache)) == len(levels_to_build())
    monkeypatch.setenv("PATH", "")
    assert load().ts_answer() == 42


def test_build_ahead_into_a_folder_that_cannot_be_used(sources, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep the CPU kernels: Not a directory"):
        build_ahead(None, cache=str(tmp_path / "file"), sources=sources, note=print)


# -- what the operator says


def test_the_setting_reaches_the_engine():
    settings = load_settings(flags={}, env={"TWOSTROKE_KERNELS": "torch"})
    config = engine_config(settings, ResolvedModel(path="m", served_name="m"))
    assert config.kernels == "torch"
    assert EngineConfig(model_path="m").kernels == "auto"


def test_the_cache_follows_xdg():
    assert kernel_cache({"XDG_CACHE_HOME": "/c"}) == "/c/twostroke/kernels"
    assert kernel_cache({}) is None
    assert cache_folder(None) == Path.home() / ".cache" / "twostroke" / "kernels"


def test_the_command_tells_in_one_line_why_it_cannot_build(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert main(["build-kernels", "--level", "plain"]) == 2
    assert capsys.readouterr().err == (
        "twostroke build-kernels: no C++ compiler found (looked for g++ and clang++)\n"
    )
    assert (tmp_path / "twostroke" / "kernels").is_dir()
