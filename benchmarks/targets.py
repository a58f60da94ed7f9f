"""What the measured servers are held against: pure, from runs to ratios and tables.

A ratio is that of the medians over the rounds; its spread is that of the rounds' own ratios, for in
one round both sides ran within a few minutes of each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.loads import Run

Runs = Mapping[str, Mapping[str, Sequence[Run]]]
"""Server's name -> load's name -> one run per round."""

QUANTIZED = ("ours int4", "ours int8", "ours int4, int8 KV", "ours int8, int8 KV")
INT8 = ("ours int8",)
WITHOUT_CACHE = ("ours int8, no prefix cache",)
BFLOAT16 = ("ours bf16",)
LLAMA = ("llama-server",)
VLLM = ("vLLM",)
PEERS = (*LLAMA, *VLLM)
HIGHER_IS_BETTER = {"output_tok_s": True, "prefill_tok_s": True}
UNITS = {
    "output_tok_s": "tok/s",
    "prefill_tok_s": "prefill tok/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p95_ms": "TTFT p95 ms",
}


class Target(NamedTuple):
    """The best of `ours` beside the best of `peers`: at least `factor` times theirs, or at most
    where less is better."""

    load: str
    measure: str
    ours: tuple[str, ...]
    peers: tuple[str, ...]
    factor: float


TARGETS = (
    Target("1 stream", "output_tok_s", QUANTIZED, LLAMA, 3.5),
    Target("8 streams", "output_tok_s", QUANTIZED, PEERS, 3.3),
    Target("32 streams", "output_tok_s", QUANTIZED, VLLM, 2.6),
    Target("32 streams", "ttft_p95_ms", QUANTIZED, VLLM, 0.5),
    Target("1 stream", "output_tok_s", BFLOAT16, LLAMA, 0.9),
    Target("8 streams", "output_tok_s", BFLOAT16, VLLM, 2.2),
    Target("32 streams", "output_tok_s", BFLOAT16, VLLM, 2.0),
    Target("prefill 512", "prefill_tok_s", INT8, PEERS, 2.0),
    Target("prefill 2048", "prefill_tok_s", INT8, PEERS, 1.5),
    Target("prefill 512", "prefill_tok_s", BFLOAT16, PEERS, 1.4),
    Target("prefill 2048", "prefill_tok_s", BFLOAT16, PEERS, 1.1),
    Target("shared prefix", "output_tok_s", QUANTIZED, VLLM, 2.0),
    Target("shared prefix", "ttft_p50_ms", QUANTIZED, VLLM, 0.5),
    Target("shared prefix", "ttft_p50_ms", INT8, WITHOUT_CACHE, 0.05),
)
MAX_STARTUP_S = 8.0
"""From the command to the first token, files in the page cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`ratio` is None where a side was not measured."""

    target: Target
    ours: str = ""
    ours_median: float = 0.0
    peer: str = ""
    peer_median: float = 0.0
    ratio: float | None = None
    lowest: float = 0.0
    highest: float = 0.0

    @property
    def is_met(self) -> bool:
        assert self.ratio is not None, "not measured"
        if HIGHER_IS_BETTER.get(self.target.measure, False):
            return self.ratio >= self.target.factor
        return self.ratio <= self.target.factor


def judge(target: Target, runs: Runs) -> Verdict:
    ours = _best(target.ours, target.load, target.measure, runs)
    peer = _best(target.peers, target.load, target.measure, runs)
    if ours is None or peer is None:
        return Verdict(target=target)
    mine = by_round(runs, ours, target.load, target.measure)
    theirs = by_round(runs, peer, target.load, target.measure)
    paired = [mine[number] / theirs[number] for number in mine.keys() & theirs.keys()]
    ours_median, peer_median = (
        statistics.median(mine.values()),
        statistics.median(theirs.values()),
    )
    return Verdict(
        target=target,
        ours=ours,
        ours_median=ours_median,
        peer=peer,
        peer_median=peer_median,
        ratio=ours_median / peer_median,
        lowest=min(paired, default=0.0),
        highest=max(paired, default=0.0),
    )


def by_round(runs: Runs, server: str, load: str, measure: str) -> dict[int, float]:
    """Of whole runs: one with failed or cut requests says nothing of speed."""
    return {
        number: getattr(run, measure)
        for number, run in enumerate(runs.get(server, {}).get(load, ()))
        if not run.num_failed and not run.num_cut
    }


def _best(servers: Sequence[str], load: str, measure: str, runs: Runs) -> str | None:
    sign = 1 if HIGHER_IS_BETTER.get(measure, False) else -1
    medians = [
        (sign * statistics.median(found.values()), server)
        for server in servers
        if (found := by_round(runs, server, load, measure))
    ]
    return max(medians)[1] if medians else None


def ratio_table(verdicts: Sequence[Verdict]) -> list[str]:
    lines = [
        "| load | measure | ours | peer | ratio (spread) | target | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return lines + [_ratio_row(verdict) for verdict in verdicts]


def _ratio_row(verdict: Verdict) -> str:
    target = verdict.target
    head = f"| {target.load} | {UNITS[target.measure]} "
    sign = "at least" if HIGHER_IS_BETTER.get(target.measure, False) else "at most"
    wanted = f"{sign} {target.factor:g}"
    if verdict.ratio is None:
        sides = f"| {' or '.join(target.ours)} | {' or '.join(target.peers)} "
        return f"{head}{sides}| | {wanted} | not measured |"
    return (
        f"{head}| {verdict.ours}: {number(verdict.ours_median)} "
        f"| {verdict.peer}: {number(verdict.peer_median)} "
        f"| {verdict.ratio:.3g} ({verdict.lowest:.3g} to {verdict.highest:.3g}) | {wanted} "
        f"| {'met' if verdict.is_met else f'missed by {missed_by(verdict):.0%}'} |"
    )


def missed_by(verdict: Verdict) -> float:
    """How much of the wanted factor is lacking, or how far it is exceeded."""
    assert verdict.ratio is not None
    return abs(1 - verdict.ratio / verdict.target.factor)


def load_table(runs: Runs, loads: Sequence[str]) -> list[str]:
    """Medians over the rounds, of each measure; the most that others used in one of them."""
    lines = [
        "| load | server | tok/s (lowest to highest) | prefill tok/s | TTFT p50, p95 ms "
        "| ITL p50, p95 ms | others' cores |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for load in loads:
        lines += [
            _load_row(load, server, by_load[load])
            for server, by_load in runs.items()
            if by_load.get(load)
        ]
    return lines


def _load_row(load: str, server: str, runs: Sequence[Run]) -> str:
    def median(measure: str) -> str:
        return number(statistics.median(getattr(run, measure) for run in runs))

    speeds = [run.output_tok_s for run in runs]
    spread = f" ({number(min(speeds))} to {number(max(speeds))})"
    broken = sum(run.num_failed + run.num_cut for run in runs)
    note = (
        f"; {broken} of {sum(run.num_requests for run in runs)} requests not ended"
        if broken
        else ""
    )
    is_prefill = load.startswith("prefill")
    return (
        f"| {load} | {server} | {'' if is_prefill else median('output_tok_s') + spread}{note} "
        f"| {median('prefill_tok_s') if is_prefill else ''} "
        f"| {median('ttft_p50_ms')}, {median('ttft_p95_ms')} "
        f"| {'' if is_prefill else median('itl_p50_ms') + ', ' + median('itl_p95_ms')} "
        f"| {max(run.other_cores for run in runs):.2f} |"
    )


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
