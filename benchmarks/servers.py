"""Servers under test: how ours and the peers are started well, held still, and ended.

Owns the processes it starts and no others. A server that is not being measured is stopped by signal
(SIGSTOP), all its processes, so that it cannot take a cycle from the one that is. Knows no load.

Every server gets the flags its own documents advise for this load: see the three functions at the
end. Threads are the same for all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What to start. `name` is the row of a table: two servers may share it, each for some loads,
    where a peer needs other flags for each."""

    name: str
    note: str
    """Flags and weights, as a reader wants to know them."""
    command: tuple[str, ...]
    """"{port}" stands for the port."""
    loads: frozenset[str]
    env: dict[str, str] = field(default_factory=dict)
    ready_s: float = 180.0
    """Compiling kernels included, where nothing is cached yet."""


class ServerFailed(Exception):
    """It did not start, or it died. Ends no run: the reason stands in the results."""


class RunningServer:
    """Raises ServerFailed at construction where it does not come up."""

    def __init__(self, server: Server, log: IO[bytes]) -> None:
        self.server = server
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = psutil.Popen(
            [part.replace("{port}", str(self.port)) for part in server.command],
            env=os.environ | server.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us alone; we end it
        )
        self._tree: list[psutil.Process] = [self._process]
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        if self._process.poll() is not None:
            raise ServerFailed(f"ended with exit code {self._process.returncode}")

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """User and system time so far of all its processes that live."""
        return sum(_of_living(self._processes(), cpu_seconds))

    def memory_mib(self) -> float:
        return sum(_of_living(self._processes(), lambda process: process.memory_info().rss)) / 2**20

    def stop(self) -> None:
        """All its processes, politely and then not."""
        processes = self._processes()
        self._signal(signal.SIGCONT)
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.terminate()
        _, alive = psutil.wait_procs(processes, timeout=20)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=10)

    def _processes(self) -> list[psutil.Process]:
        """Those seen before stay in: orphans of a root that died are still ours to end."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._tree = list({*self._tree, *self._process.children(recursive=True)})
        return self._tree

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.server.ready_s
        while time.monotonic() < deadline:
            self.check()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=2, trust_env=False).status_code == 200:
                    return
            time.sleep(0.05)
        raise ServerFailed(f"not ready after {self.server.ready_s:.0f} s")


@contextlib.contextmanager
def running(server: Server, logs: Path) -> Iterator[RunningServer]:
    with (logs / f"{server.name}-{free_port()}.log").open("wb") as log:
        running_server = RunningServer(server, log)
        try:
            yield running_server
        finally:
            running_server.stop()


def _of_living(
    processes: list[psutil.Process], measure: Callable[[psutil.Process], float]
) -> list[float]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(measure(process))
    return found


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


MODEL = "m"
"""The name all servers serve their model under."""
LISTEN = ("--host", "127.0.0.1", "--port", "{port}")


def ours(
    name: str, model: str, options: tuple[str, ...], loads: frozenset[str], *, threads: int
) -> Server:
    command = (sys.executable, "-m", "deploy.cli", "up", model, *LISTEN)
    flags = ("--served-model-name", MODEL, "--threads", str(threads), *options)
    return Server(
        name=name,
        note=" ".join(("twostroke up", *flags[2:])),
        command=command + flags,
        loads=loads,
        # Threads are the worker's to set; an inherited limit would hold it to less.
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)},
    )


def llama_server(
    binary: Path,
    gguf: str,
    options: tuple[str, ...],
    loads: frozenset[str],
    *,
    threads: int,
    num_slots: int,
    slot_tokens: int,
) -> Server:
    """Its KV is cut into equal slots of fixed length: as many as the load has streams, each as long
    as the load needs, is what suits it best."""
    flags = ("-t", str(threads), "-np", str(num_slots), "-c", str(num_slots * slot_tokens))
    return Server(
        name="llama-server",
        note=" ".join(("llama-server, the GGUF as it is,", *flags, *options)),
        command=(str(binary), "-m", gguf, *flags, *options, *LISTEN),
        loads=loads,
    )


def vllm(python: Path, folder: Path, loads: frozenset[str], *, threads: int) -> Server:
    """Without VLLM_CPU_NUM_OF_RESERVED_CPU=0 it leaves one core to its other processes, and
    computes on one where there are two. It advises to preload Intel's OpenMP, which its wheel
    brings."""
    preload = sorted(python.parent.parent.rglob("libiomp5.so"))[:1]
    module = ("-m", "vllm.entrypoints.openai.api_server", "--served-model-name", MODEL)
    flags = ("--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "32")
    return Server(
        name="vLLM",
        note=" ".join(("vLLM", *flags))
        + f", {threads} threads, KV 2 GiB, {'libiomp5 preloaded' if preload else 'torch OpenMP'}",
        command=(str(python), *module, "--model", str(folder), *flags, *LISTEN),
        loads=loads,
        env={
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": str(threads),
            "LD_PRELOAD": ":".join(map(str, preload)),
        },
        ready_s=400.0,
    )
