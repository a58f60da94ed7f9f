"""What the colocated engine gains by its batching, its prefix cache and its paged memory.

    python benchmarks/engine.py --out benchmarks/results/engine.json

Four questions, as the published systems ask them (Orca, OSDI 2022; vLLM, arXiv:2309.06180; SGLang,
arXiv:2312.07104). In the first two, both sides run in turn on one engine, several times; every run
is listed, the ratio is that of the medians, its spread that of the paired runs.

batching    static (a batch starts when the one before has wholly ended) against continuous, on
            prompts and answers of mixed lengths. Offline: all requests are there from the start.
cache       prefix cache off against on: chats that share a system prompt and come back for a second
            turn with their first turn as prompt.
memory      a pool too small for its load: how full it is when the first answer is preempted, the
            empty slots inside blocks, and how many sequences would fit were each given its longest
            possible length at once, as engines did before paging.
footprint   peak resident memory against weights + KV pool.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core.config import CacheConfig, EngineConfig, SchedulerConfig
from core.request import GenerateRequest
from core.sampling_params import SamplingParams
from deploy.model_source import resolve_model
from engine.executor import LocalExecutor
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner

MIB = 1 << 20


def say(text: str) -> None:
    print(text, flush=True)


def request(request_id: str, prompt: Sequence[int], num_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return GenerateRequest(
        request_id=request_id, model="", prompt_token_ids=tuple(prompt), sampling=sampling
    )


def mixed_requests(count: int, vocab_size: int) -> list[GenerateRequest]:
    """Prompts of 16 to 128 tokens; answers mostly short with a long tail, as chats have them."""
    rng = random.Random(1)
    return [
        request(
            f"{i}",
            [rng.randrange(100, vocab_size) for _ in range(rng.randint(16, 128))],
            min(384, 8 + int(rng.expovariate(1 / 64))),
        )
        for i in range(count)
    ]


class Bench:
    """One runner for all engines: the weights are loaded once."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.config = self.engine_config()
        say(f"loading {arguments.model}")
        self.runner = ModelRunner(self.config)
        self.vocab_size = self.runner.model_config.vocab_size

    def engine_config(self, *, caching: bool = False, num_seqs: int = 16) -> EngineConfig:
        return EngineConfig(
            model_path=resolve_model(self.arguments.model).path,
            dtype=self.arguments.dtype,
            num_threads=self.arguments.threads,
            max_model_len=2048,
            cache=CacheConfig(num_blocks=self.arguments.num_blocks, enable_prefix_caching=caching),
            scheduler=SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=num_seqs),
        )

    def engine(self, *, num_blocks: int | None = None, **settings) -> LLMEngine:
        """A fresh pool over the same memory; fewer blocks leave the rest of it unused."""
        executor = LocalExecutor(self.runner)
        executor.num_blocks = num_blocks or executor.num_blocks
        return LLMEngine(self.engine_config(**settings), executor)


MEASURES = ("output_tok_s", "ttft_p50_s")


def compare(sides: dict[str, Callable[[], dict]], runs: int) -> dict:
    """Run the sides in turn, `runs` times each; ratios are second side to first."""
    seen: dict[str, list[dict]] = {name: [] for name in sides}
    for index in range(runs):
        for name, side in sides.items():
            seen[name].append(side())
            say(f"  run {index + 1}/{runs} {name}: {seen[name][-1]}")
    return {"runs": seen} | {measure: ratio(*seen.values(), measure) for measure in MEASURES}


def ratio(base: list[dict], other: list[dict], measure: str) -> dict:
    paired = [b[measure] / a[measure] for a, b in zip(base, other, strict=True)]
    medians = [statistics.median(run[measure] for run in side) for side in (base, other)]
    return {
        "ratio": round(medians[1] / medians[0], 3),
        "spread": [round(min(paired), 3), round(max(paired), 3)],
    }


def drive(engine: LLMEngine, requests: Sequence[GenerateRequest], start: float) -> dict:
    """Run to the end. Seconds since `start` of each request's first and last token, by id."""
    for item in requests:
        engine.add_request(item)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while engine.has_unfinished_requests:
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            first.setdefault(output.request_id, now)
            last[output.request_id] = now
    return {"first": first, "last": last}


def summary(first: dict[str, float], last: dict[str, float], num_tokens: int) -> dict:
    wall = max(last.values())
    return {
        "output_tok_s": round(num_tokens / wall, 1),
        "ttft_p50_s": round(statistics.median(first.values()), 3),
        "latency_p50_s": round(statistics.median(last.values()), 2),
        "wall_s": round(wall, 2),
    }


def batching(bench: Bench, count: int, num_seqs: int) -> dict[str, Callable[[], dict]]:
    requests = mixed_requests(count, bench.vocab_size)
    num_tokens = sum(item.sampling.max_tokens for item in requests)

    def static() -> dict:
        engine, start = bench.engine(num_seqs=num_seqs), time.perf_counter()
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        for i in range(0, count, num_seqs):
            seen = drive(engine, requests[i : i + num_seqs], start)
            first |= seen["first"]
            last |= seen["last"]
        return summary(first, last, num_tokens)

    def continuous() -> dict:
        engine, start = bench.engine(num_seqs=num_seqs), time.perf_counter()
        seen = drive(engine, requests, start)
        return summary(seen["first"], seen["last"], num_tokens)

    return {"static": static, "continuous": continuous}


def chats(bench: Bench, count: int) -> tuple[list[GenerateRequest], int]:
    rng = random.Random(2)
    system = [rng.randrange(100, bench.vocab_size) for _ in range(512)]
    turns = [
        [*system, *(rng.randrange(100, bench.vocab_size) for _ in range(32))] for _ in range(count)
    ]
    return [request(f"{i}", turn, 16) for i, turn in enumerate(turns)], 16


def cache(bench: Bench, count: int) -> dict[str, Callable[[], dict]]:
    requests, num_output = chats(bench, count)

    def run(caching: bool) -> dict:
        """Four chats at a time, each two turns."""
        engine, begin = bench.engine(caching=caching, num_seqs=4), time.perf_counter()
        ttft: list[float] = []
        for i in range(0, count, 4):
            answers: dict[str, list[int]] = {}
            some = requests[i : i + 4]
            for _turn in range(2):
                start = time.perf_counter()
                answers = {item.request_id: [] for item in some}
                for item in some:
                    engine.add_request(item)
                while engine.has_unfinished_requests:
                    for output in engine.step():
                        if not answers[output.request_id]:
                            ttft.append(time.perf_counter() - start)
                        answers[output.request_id] += output.chunk.token_ids
                some = [
                    request(
                        f"{item.request_id}+",
                        [*item.prompt_token_ids, *answers[item.request_id], *range(200, 220)],
                        num_output,
                    )
                    for item in some
                ]
        wall = time.perf_counter() - begin
        return {
            "output_tok_s": round(2 * count * num_output / wall, 1),
            "ttft_p50_s": round(statistics.median(ttft), 3),
            "wall_s": round(wall, 2),
        }

    return {"off": lambda: run(False), "on": lambda: run(True)}


def memory(bench: Bench) -> dict:
    """64 requests over 120 blocks."""
    num_blocks, block_size = 120, bench.runner.kv_cache.layout.block_size
    engine = bench.engine(num_blocks=num_blocks, num_seqs=64)
    requests = mixed_requests(64, bench.vocab_size)
    for item in requests:
        engine.add_request(item)
    used, wasted, most, num_unfinished = [], [], 0, len(requests)
    while engine.has_unfinished_requests:
        outputs = engine.step()
        num_unfinished -= sum(output.chunk.finish_reason is not None for output in outputs)
        usage = engine.kv_usage
        if num_unfinished > usage.num_sequences:  # somebody waits for memory
            used.append(usage.used)
        if usage.num_sequences:
            wasted.append(usage.num_empty_slots / usage.num_sequences)
            most = max(most, usage.num_sequences)
    usage = engine.kv_usage
    longest = max(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests)
    return {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "used_share_at_lowest_preemption": round(
            (usage.num_used_at_preemption or 0) / num_blocks, 3
        ),
        "used_share_while_others_wait": {
            "mean": round(statistics.mean(used), 3),
            "min": round(min(used), 3),
        },
        "num_preemptions": usage.num_preemptions,
        "empty_slots_per_sequence": {
            "mean": round(statistics.mean(wasted), 2),
            "max": round(max(wasted), 2),
        },
        "most_sequences_at_once": most,
        "sequences_if_longest_length_were_reserved": num_blocks * block_size // longest,
    }


def footprint(bench: Bench) -> dict:
    pool = bench.runner.kv_cache.tensor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "weights_mib": round(bench.runner.weight_bytes / MIB, 1),
        "kv_pool_mib": round(pool.numel() * pool.element_size() / MIB, 1),
        "peak_rss_mib": round(peak / MIB, 1),
        "imports_only_rss_mib": bench.arguments.imports_rss,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--num-seqs", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=1200)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arguments.imports_rss = round(peak / 1024, 1)
    bench = Bench(arguments)
    result: dict = {
        "model": arguments.model,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__,
    }
    say("static against continuous batching")
    sides = batching(bench, arguments.requests, arguments.num_seqs)
    result["batching"] = compare(sides, arguments.runs)
    say("prefix cache off against on")
    result["cache"] = compare(cache(bench, 8), arguments.runs)
    say("memory of a pool that is too small")
    result["memory"] = memory(bench)
    result["footprint"] = footprint(bench)
    text = json.dumps(result, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    for name in ("batching", "cache"):
        for measure in MEASURES:
            say(f"{name}: {measure} {result[name][measure]}")
    say(json.dumps({name: result[name] for name in ("memory", "footprint")}, indent=1))


if __name__ == "__main__":
    main()
