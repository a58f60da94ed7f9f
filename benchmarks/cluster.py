"""First numbers of a whole cluster on this machine: TTFT, TPOT, KV moved, router cost, memory.

    python benchmarks/cluster.py --streams 1 8 32 --out benchmarks/results/cluster.json

Starts `twostroke up` (Ray, router, workers), loads it through the OpenAI endpoint, reads each
request's timeline back from /debug/requests, and stops what it started. Nothing is tuned here: the
figures say where the system stands; every run is listed, so the machine's noise can be seen.

`router_process_cpu_us_per_token` is user and system time of the `up` process, which holds router
and Ray's driver, over the run's output tokens. `overhead_ms` is what a client waits for its first
token beyond the worker's own queue and prefill time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.load import Outcome, closed_loop, percentile, workload


def milliseconds(values: list[float]) -> dict[str, float]:
    """p50, p95 and the largest, in milliseconds."""
    if not values:
        return {}
    return {
        "p50": round(1e3 * statistics.median(values), 2),
        "p95": round(1e3 * percentile(values, 0.95), 2),
        "max": round(1e3 * max(values), 2),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running_cluster(arguments: argparse.Namespace):
    """`twostroke up` as a user would start it; yields (url, process)."""
    port = free_port()
    command = [sys.executable, "-m", "deploy.cli", "up", arguments.model, "--debug"]
    command += ["--prefill", str(arguments.prefill), "--decode", str(arguments.decode)]
    command += ["--port", str(port), "--dtype", arguments.dtype, "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process)
        yield url, process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_healthy(url: str, process: subprocess.Popen, timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the cluster ended with exit code {process.returncode}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit("the cluster did not become healthy")


def memory_by_process(root: psutil.Process) -> list[dict]:
    rows = []
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            rss_mb = round(process.memory_info().rss / 2**20, 1)
            rows.append({"process": role_of(process, root), "rss_mb": rss_mb})
    return sorted(rows, key=lambda row: -row["rss_mb"])


def role_of(process: psutil.Process, root: psutil.Process) -> str:
    """What a process is, without this machine's paths."""
    if process == root:
        return "up: router and Ray driver"
    title = " ".join(process.cmdline())
    if "RankActor" in title:
        return "worker (Ray actor)"
    return "controller (Ray actor)" if "ControllerActor" in title else "Ray daemon"


def timelines(url: str, outcomes: list[Outcome]) -> list[dict]:
    found = []
    for outcome in outcomes:
        reply = httpx.get(f"{url}/debug/requests/{outcome.request_id}", timeout=10, trust_env=False)
        if reply.status_code == 200:
            found.append(reply.json())
    return found


def summarise(
    outcomes: list[Outcome], seconds: float, lives: list[dict], router_cpu_s: float
) -> dict:
    good = [outcome for outcome in outcomes if outcome.error is None]
    tokens = sum(outcome.num_output_tokens for outcome in good)
    decodes = [life["decode"] for life in lives if life.get("decode")]
    pulled = [d for d in decodes if d["num_pulled_blocks"]]
    gaps = [b - a for o in good for a, b in zip(o.arrivals, o.arrivals[1:], strict=False)]
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "output_tokens_per_s": round(tokens / seconds, 1),
        "ttft_ms": milliseconds([outcome.ttft_s for outcome in good]),
        "tpot_ms": milliseconds([outcome.tpot_s for outcome in good]),
        "itl_ms": milliseconds(gaps),
        "kv_transfer": {
            "transfers": len(pulled),
            "bytes_per_transfer": round(
                statistics.mean([d["num_pulled_bytes"] for d in pulled]) if pulled else 0
            ),
            "ms": milliseconds([d["transfer_s"] for d in pulled]),
            "mb_per_s": round(
                sum(d["num_pulled_bytes"] for d in pulled)
                / 1e6
                / max(1e-9, sum(d["transfer_s"] for d in pulled)),
                1,
            ),
        },
        "overhead_ms": milliseconds(
            [
                life["ttft_s"] - life["prefill"]["queue_s"] - life["prefill"]["prefill_s"]
                for life in lives
                if life.get("prefill") and life.get("ttft_s") is not None
            ]
        ),
        "router_process_cpu_us_per_token": round(1e6 * router_cpu_s / max(1, tokens), 1),
    }


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(
    url: str, process: psutil.Process, arguments: argparse.Namespace, streams: int, seed: int
) -> dict:
    asks = workload(
        num_requests=max(4, 2 * streams),
        prompt_tokens=(arguments.prompt_tokens, arguments.prompt_tokens),
        output_tokens=(arguments.output_tokens, arguments.output_tokens),
        seed=seed,  # a prompt seen before would come from the prefix cache
    )
    before = cpu_seconds(process)
    outcomes, seconds = asyncio.run(closed_loop(url, arguments.served, asks, streams))
    spent = cpu_seconds(process) - before
    return summarise(outcomes, seconds, timelines(url, outcomes), spent)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--served", default="smollm2", help="model name to send")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = {
        "command": "python " + " ".join(["benchmarks/cluster.py", *sys.argv[1:]]),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "threads_per_worker": 1,
        "load": {
            "prompt_tokens": arguments.prompt_tokens,
            "output_tokens": arguments.output_tokens,
        },
        "runs": {},
    }
    with running_cluster(arguments) as (url, child):
        process = psutil.Process(child.pid)
        measure(url, process, arguments, 8, seed=0)  # warm-up, not counted
        for streams in arguments.streams:
            runs = [
                measure(url, process, arguments, streams, seed=100 * streams + run)
                for run in range(1, arguments.runs + 1)
            ]
            result["runs"][str(streams)] = runs
            for run in runs:
                print(json.dumps({"streams": streams, **run}), flush=True)
        result["memory"] = memory_by_process(process)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
