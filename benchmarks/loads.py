"""The loads that servers are compared under, and what one run of a load shows.

Prompts are cut from the text that lies beside this code, so answers are text too. Every round has
prompts of its own: a prefix cache holds only what the load itself shares.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from benchmarks.load import Ask, Outcome, closed_loop, percentile, text_workload
from benchmarks.servers import MODEL, ROOT, RunningServer, cpu_seconds
from router.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Lengths in tokens."""

    name: str
    num_streams: int
    num_requests: int
    prompt_tokens: int = 128
    """Of each prompt alone."""
    shared_tokens: int = 0
    """Before these, the same in all."""
    output_tokens: int = 128


LOADS = (
    Load(name="1 stream", num_streams=1, num_requests=4),
    Load(name="8 streams", num_streams=8, num_requests=16),
    Load(name="32 streams", num_streams=32, num_requests=32),
    Load(name="prefill 512", num_streams=1, num_requests=3, prompt_tokens=512, output_tokens=1),
    Load(name="prefill 2048", num_streams=1, num_requests=2, prompt_tokens=2048, output_tokens=1),
    Load(
        name="shared prefix",
        num_streams=8,
        num_requests=32,
        prompt_tokens=50,
        shared_tokens=1500,
        output_tokens=32,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a load on a server. Milliseconds; `other_cores` are those that processes neither
    of the server nor of this client used meanwhile."""

    num_requests: int
    num_failed: int
    num_cut: int
    """Not finished when the run's time was up."""
    seconds: float
    output_tok_s: float
    prefill_tok_s: float
    """Prompt tokens over the time to first token, of the requests' median."""
    ttft_p50_ms: float
    ttft_p95_ms: float
    itl_p50_ms: float
    itl_p95_ms: float
    server_cores: float
    client_cores: float
    other_cores: float
    error: str | None = None


def text_tokens(model: str) -> list[int]:
    """Licence, documents and the quality text of this project, some 20,000 tokens."""
    paths = [ROOT / "LICENSE", ROOT / "benchmarks" / "quality_text.txt"]
    paths += sorted((ROOT / "docs").glob("*.md"))
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in paths)
    return load_tokenizer(model).encode(text, add_special_tokens=False)


def asks(load: Load, token_ids: Sequence[int], seed: int) -> list[Ask]:
    return text_workload(
        token_ids,
        num_requests=load.num_requests,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        num_shared_tokens=load.shared_tokens,
        seed=seed,
    )


def measure(server: RunningServer, load: Load, wanted: list[Ask], *, cut_after_s: float) -> Run:
    client = psutil.Process()
    before = busy_seconds(), server.cpu_seconds(), cpu_seconds(client)
    outcomes, seconds = asyncio.run(
        closed_loop(server.url, MODEL, wanted, load.num_streams, cut_after_s)
    )
    after = busy_seconds(), server.cpu_seconds(), cpu_seconds(client)
    machine, served, asked = (
        max(0.0, (b - a) / seconds) for a, b in zip(before, after, strict=True)
    )
    return summary(
        wanted,
        outcomes,
        seconds,
        server_cores=served,
        client_cores=asked,
        other_cores=max(0.0, machine - served - asked),
    )


def summary(wanted: list[Ask], outcomes: list[Outcome], seconds: float, **cores: float) -> Run:
    good = [outcome for outcome in outcomes if outcome.error is None]
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    ttft = [1e3 * outcome.ttft_s for outcome in good]
    gaps = [1e3 * (b - a) for o in good for a, b in zip(o.arrivals, o.arrivals[1:], strict=False)]
    prompt_tokens = statistics.median(len(one.prompt) for one in wanted)
    ttft_p50 = percentile(ttft, 0.5)
    return Run(
        num_requests=len(wanted),
        num_failed=len(errors),
        num_cut=len(wanted) - len(outcomes),
        seconds=round(seconds, 3),
        output_tok_s=round(sum(outcome.num_output_tokens for outcome in good) / seconds, 2),
        prefill_tok_s=round(1e3 * prompt_tokens / ttft_p50, 1) if ttft else 0.0,
        ttft_p50_ms=round(ttft_p50, 2),
        ttft_p95_ms=round(percentile(ttft, 0.95), 2),
        itl_p50_ms=round(percentile(gaps, 0.5), 2),
        itl_p95_ms=round(percentile(gaps, 0.95), 2),
        error=errors[0] if errors else None,
        **{name: round(value, 2) for name, value in cores.items()},
    )


def busy_seconds() -> float:
    """Of all cores since boot."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)
