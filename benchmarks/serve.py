"""Ours beside the peers that are installed, over HTTP: the table of ratios that we are held to.

    python benchmarks/serve.py --llama-server PATH --vllm-python PATH --hf-folder PATH \\
        --out benchmarks/results/serve.json
    python benchmarks/serve.py --cluster --out benchmarks/results/serve_cluster.json

Starts every server on its own port and keeps all but the one that is measured stopped (SIGSTOP).
The rounds alternate: each load runs on all servers in turn, then the next load; medians are over
rounds. A peer that is not given is said to be absent; one that fails is reported, and the others
run on. With --cluster, ours alone: one prefill and one decode worker of one thread each beside the
colocated engine, on equal weights.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loads import LOADS, Load, Run, asks, measure, text_tokens
from benchmarks.servers import (
    ROOT,
    RunningServer,
    Server,
    ServerFailed,
    llama_server,
    ours,
    running,
    vllm,
)
from benchmarks.targets import (
    MAX_STARTUP_S,
    TARGETS,
    WITHOUT_CACHE,
    Verdict,
    judge,
    load_table,
    ratio_table,
)
from deploy.model_source import resolve_model

FORMATS = {
    "int4": ("--dtype", "bfloat16", "--quantization", "int4"),
    "int8": ("--dtype", "bfloat16", "--quantization", "int8"),
    "bf16": ("--dtype", "bfloat16"),
}
FORMATS |= {
    f"{name}, int8 KV": (*FORMATS[name], "--kv-cache-dtype", "int8") for name in ("int4", "int8")
}
ALL = frozenset(load.name for load in LOADS)
FIRST_TOKEN = Load(
    name="first token", num_streams=1, num_requests=1, prompt_tokens=16, output_tokens=1
)
WARM_UP = Load(name="warm-up", num_streams=4, num_requests=8, prompt_tokens=100, output_tokens=16)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- what is compared


def peer_servers(arguments: argparse.Namespace, gguf: str) -> list[Server]:
    """Those given. Two of llama-server, because its number of slots must fit the load."""
    servers: list[Server] = []
    if arguments.llama_server:
        options = tuple(arguments.llama_options.split())
        for num_slots, slot_tokens, loads in (
            (8, 2304, ALL - {"32 streams"}),
            (32, 512, frozenset({"32 streams"})),
        ):
            servers.append(
                llama_server(
                    arguments.llama_server,
                    gguf,
                    options,
                    loads,
                    threads=arguments.threads,
                    num_slots=num_slots,
                    slot_tokens=slot_tokens,
                )
            )
    if arguments.vllm_python and arguments.hf_folder:
        servers.append(
            vllm(arguments.vllm_python, arguments.hf_folder, ALL, threads=arguments.threads)
        )
    return servers


def own_servers(arguments: argparse.Namespace, model: str) -> list[Server]:
    colocated = tuple(arguments.ours_options.split())
    return [
        ours(
            f"ours {name}",
            model,
            (*FORMATS[name], *colocated),
            ALL,
            threads=arguments.threads,
        )
        for name in arguments.formats
    ] + [
        ours(
            WITHOUT_CACHE[0],
            model,
            (*FORMATS["int8"], *colocated, "--no-prefix-cache"),
            frozenset({"shared prefix"}),
            threads=arguments.threads,
        )
    ]


def cluster_servers(arguments: argparse.Namespace, model: str) -> list[Server]:
    """Equal weights, equal number of threads in all."""
    split = ("--backend", "processes", "--prefill", "1", "--decode", "1")
    colocated = tuple(arguments.ours_options.split())
    servers = []
    for name in arguments.formats:
        options = FORMATS[name]
        servers += [
            ours(f"colocated {name}", model, (*options, *colocated), ALL, threads=2),
            ours(f"1 prefill + 1 decode {name}", model, (*options, *split), ALL, threads=1),
        ]
    return servers


def absent(arguments: argparse.Namespace) -> list[str]:
    missing = []
    if not arguments.llama_server:
        missing.append("llama-server: no --llama-server")
    if not (arguments.vllm_python and arguments.hf_folder):
        missing.append("vLLM: no --vllm-python and --hf-folder")
    return missing


# -- the run


class Bench:
    """All servers, their runs so far, and what became of those that failed."""

    def __init__(self, arguments: argparse.Namespace, model: str, stack: ExitStack) -> None:
        self.arguments = arguments
        self.texts = text_tokens(model)
        self.runs: dict[str, dict[str, list[Run]]] = {}
        self.startup_s: dict[str, list[float]] = {}
        self.memory_mib: dict[str, float] = {}
        self.failures: list[str] = []
        self._stack = stack
        self._logs = Path(arguments.logs or stack.enter_context(tempfile.TemporaryDirectory()))
        self._logs.mkdir(parents=True, exist_ok=True)
        self._servers: list[RunningServer] = []
        self._too_slow: set[tuple[str, str]] = set()
        self._seeds = iter(range(1, 1 << 30))

    def start(self, server: Server) -> None:
        """It stays, stopped, until its turn."""
        say(f"starting {server.name}: {server.note}")
        started = time.perf_counter()
        try:
            one = self._stack.enter_context(running(server, self._logs))
        except ServerFailed as error:
            self._fail(server.name, error)
            return
        self._servers.append(one)
        if self._first_token(one, started) and self.run(one, WARM_UP):
            one.pause()

    def warm(self, server: Server) -> None:
        """Start and end it: files are then in the page cache, and what is compiled is compiled."""
        say(f"starting and ending {server.name}, untimed")
        try:
            with running(server, self._logs):
                pass
        except ServerFailed as error:
            self._fail(server.name, error)

    def time_startup(self, server: Server) -> None:
        """Start it to the first token, and end it."""
        started = time.perf_counter()
        try:
            with running(server, self._logs) as one:
                self._first_token(one, started)
        except ServerFailed as error:
            self._fail(server.name, error)

    def round(self, loads: Sequence[Load]) -> None:
        for load in loads:
            seed = next(self._seeds)
            for one in self._having(load):
                one.resume()
                found = self.run(one, load, seed)
                one.pause()
                if found is not None:
                    kept = self.runs.setdefault(one.server.name, {}).setdefault(load.name, [])
                    kept.append(found)
                    say(f"  {load.name}, {one.server.name}: {brief(found)}")

    def run(self, one: RunningServer, load: Load, seed: int = 0) -> Run | None:
        """None where the server died; it is measured no more."""
        wanted = asks(load, self.texts, seed)
        found = measure(one, load, wanted, cut_after_s=self.arguments.cut_after)
        try:
            one.check()
        except ServerFailed as error:
            self._drop(one, error)
            return None
        if found.num_cut:
            self._too_slow.add((one.server.name, load.name))
        self.memory_mib[one.server.note] = round(one.memory_mib(), 1)
        return found

    def _having(self, load: Load) -> Iterator[RunningServer]:
        for one in tuple(self._servers):
            too_slow = (one.server.name, load.name) in self._too_slow
            if load.name in one.server.loads and not too_slow:
                yield one

    def _first_token(self, one: RunningServer, started: float) -> bool:
        found = self.run(one, FIRST_TOKEN)
        if found is None:
            return False
        if found.num_failed or found.num_cut:
            self._drop(one, ServerFailed(f"gave no first token: {found.error or 'too slow'}"))
            return False
        seconds = round(time.perf_counter() - started, 2)
        self.startup_s.setdefault(one.server.note, []).append(seconds)
        say(f"  first token after {seconds} s")
        return True

    def _drop(self, one: RunningServer, error: ServerFailed) -> None:
        one.stop()
        self._servers = [other for other in self._servers if other is not one]
        self._fail(one.server.name, error)

    def _fail(self, name: str, error: ServerFailed) -> None:
        self.failures.append(f"{name}: {error}")
        say(f"  {self.failures[-1]}")
        newest = max(self._logs.glob(f"{name}-*.log"), key=lambda path: path.stat().st_mtime)
        for line in newest.read_text(errors="replace").splitlines()[-8:]:
            say(f"    {line}")


def brief(run: Run) -> str:
    wrong = f", {run.num_failed} failed ({run.error})" if run.num_failed else ""
    cut = f", {run.num_cut} cut off" if run.num_cut else ""
    return (
        f"{run.output_tok_s} tok/s, TTFT p50 {run.ttft_p50_ms} ms, p95 {run.ttft_p95_ms} ms, "
        f"ITL p50 {run.itl_p50_ms} ms, others {run.other_cores} cores{wrong}{cut}"
    )


# -- what comes out


def machine(arguments: argparse.Namespace) -> dict[str, object]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "command": "python benchmarks/serve.py "
        + " ".join(Path(part).name if "/" in part else part for part in sys.argv[1:]),
        "commit": commit.stdout.strip(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "threads": arguments.threads,
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_average_before": [round(value, 2) for value in psutil.getloadavg()],
    }


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def markdown(
    bench: Bench, servers: Sequence[Server], loads: Sequence[Load], verdicts: Sequence[Verdict]
) -> str:
    lines: list[str] = []
    if not bench.arguments.cluster:
        lines += [*ratio_table(verdicts), ""]
    lines += [*load_table(bench.runs, [load.name for load in loads]), ""]
    lines += ["| server | first token after, s | resident MiB | how |", "| --- | --- | --- | --- |"]
    lines += [startup_row(bench, server) for server in servers]
    lines += [""] if bench.failures else []
    lines += [f"- failed: {failure}" for failure in bench.failures]
    if not bench.arguments.cluster:
        lines += [f"- absent: {reason}" for reason in absent(bench.arguments)]
    return "\n".join(lines) + "\n"


def startup_row(bench: Bench, server: Server) -> str:
    seconds = bench.startup_s.get(server.note, [])
    shown = ", ".join(f"{one:.1f}" for one in seconds)
    if server.name.startswith(("ours", "colocated")) and seconds:
        met = statistics.median(seconds) < MAX_STARTUP_S
        shown += f" ({'met' if met else 'missed'}: below {MAX_STARTUP_S:g})"
    memory = bench.memory_mib.get(server.note, 0.0)
    return f"| {server.name} | {shown} | {memory:.0f} | {server.note} |"


def write(
    bench: Bench,
    servers: Sequence[Server],
    about: dict[str, object],
    verdicts: Sequence[Verdict],
    text: str,
) -> None:
    arguments = bench.arguments
    if arguments.out is None:
        return
    result = {
        **about,
        "rounds": arguments.rounds,
        "servers": {server.note: server.name for server in servers},
        "absent": [] if arguments.cluster else absent(arguments),
        "failures": bench.failures,
        "startup_s": bench.startup_s,
        "memory_mib": bench.memory_mib,
        "verdicts": [
            asdict(verdict)
            | {
                "target": verdict.target._asdict(),
                "is_met": None if verdict.ratio is None else verdict.is_met,
            }
            for verdict in verdicts
        ],
        "runs": {
            name: {load: [asdict(run) for run in runs] for load, runs in by_load.items()}
            for name, by_load in bench.runs.items()
        },
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cluster", action="store_true", help="the split beside the colocated")
    parser.add_argument("--gguf", help="the model (default: the bundled one)")
    parser.add_argument("--llama-server", type=Path, metavar="PATH")
    parser.add_argument("--llama-options", default="", help="more of its flags: '-fa on'")
    parser.add_argument("--vllm-python", type=Path, metavar="PATH", help="of its environment")
    parser.add_argument("--hf-folder", type=Path, metavar="PATH", help="the same model for vLLM")
    parser.add_argument(
        "--ours-options", default="--backend local --colocated", help="more flags of `up`"
    )
    parser.add_argument("--formats", nargs="*", choices=tuple(FORMATS), help="of ours")
    parser.add_argument("--loads", nargs="+", metavar="NAME", help=", ".join(sorted(ALL)))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--startups", type=int, default=3, help="of ours, of each format")
    parser.add_argument("--cut-after", type=float, default=60.0, help="seconds of one run at most")
    parser.add_argument("--quick", action="store_true", help="few requests, one round: a trial")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs (default: none)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.formats is None:
        arguments.formats = ["int8"] if arguments.cluster else list(FORMATS)
    if unknown := set(arguments.loads or ()) - ALL:
        parser.error(f"no such load: {', '.join(sorted(unknown))}")
    if arguments.quick:
        arguments.rounds = arguments.startups = 1
    return arguments


def chosen_loads(arguments: argparse.Namespace) -> list[Load]:
    loads = [load for load in LOADS if not arguments.loads or load.name in arguments.loads]
    if arguments.quick:
        loads = [
            replace(load, num_requests=load.num_streams, output_tokens=min(16, load.output_tokens))
            for load in loads
        ]
    return loads


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, interrupt)  # as Ctrl-C: leave no server behind
    model = arguments.gguf or resolve_model("smollm2").path
    about = machine(arguments)
    if arguments.cluster:
        servers = cluster_servers(arguments, model)
    else:
        servers = [*own_servers(arguments, model), *peer_servers(arguments, model)]
    loads = chosen_loads(arguments)
    began = time.monotonic()
    with ExitStack() as stack:
        bench = Bench(arguments, model, stack)
        if arguments.formats:
            bench.warm(servers[0])
        for server in servers:
            if server.name.startswith("ours"):
                for _ in range(arguments.startups - 1):
                    bench.time_startup(server)
            bench.start(server)
        for number in range(arguments.rounds):
            say(f"round {number + 1} of {arguments.rounds}, {time.monotonic() - began:.0f} s")
            bench.round(loads)
    about["minutes"] = round((time.monotonic() - began) / 60, 1)
    verdicts = [] if arguments.cluster else [judge(target, bench.runs) for target in TARGETS]
    text = markdown(bench, servers, loads, verdicts)
    write(bench, servers, about, verdicts, text)
    print(text)


if __name__ == "__main__":
    main()
