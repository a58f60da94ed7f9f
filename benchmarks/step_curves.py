"""Time of one model step against batch, context and prompt length, each beside the machine's limit.

    python benchmarks/step_curves.py --out benchmarks/results/step_curves.json

In process: ModelRunner.execute, so sampling and building the inputs are in, HTTP and scheduling are
not. Writes a table (.md) and curves (.svg) beside the JSON.

The limit of a step is the longer of two times: bytes that it must read (weights and KV) over the
read bandwidth, and operations that it must do over the rate of a matmul. Both are measured first,
here, with torch on the same threads: bandwidth for several sizes of buffer, because small models
partly stay in the last cache (the size nearest to the step's bytes counts); the rate as the best of
a bfloat16 and, for quantised weights, an int8 product of 2048 x 2048 x 2048. A kernel of ours that
beats torch's product may come out above its limit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.svg_chart import Chart, Line, svg
from core.config import CacheConfig, EngineConfig
from core.model_config import ModelConfig
from core.sampling_params import SamplingParams
from deploy.model_source import resolve_model
from engine.batch import Batch, SampleSpec, ScheduledSequence
from engine.model_runner import ModelRunner

FORMATS = {"int4": "int4", "int8": "int8", "bf16": None}
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048, 8192)
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
MAX_KV_TOKENS = 1 << 16
"""Of the pool: longer contexts are not run at the largest batches."""
BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this machine does at best. Bytes and operations per second."""

    read_bandwidth: dict[int, float]
    """Bytes of the buffer -> bytes per second."""
    bfloat16_ops: float
    int8_ops: float

    def seconds(self, num_bytes: float, ops: float, *, quantized: bool) -> float:
        size = min(self.read_bandwidth, key=lambda size: abs(math.log(size / num_bytes)))
        rate = max(self.bfloat16_ops, self.int8_ops) if quantized else self.bfloat16_ops
        return max(num_bytes / self.read_bandwidth[size], ops / rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One step (decode) or one whole prompt (prefill). Milliseconds; tokens per second."""

    weights: str
    kind: str
    batch: int
    context: int
    """Tokens a decoded one attends to; of a prompt, its length."""
    median_ms: float
    lowest_ms: float
    limit_ms: float
    tok_s: float

    @property
    def share_of_limit(self) -> float:
        return self.limit_ms / self.median_ms


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- the limits


def repeated(work: Callable[[], object], budget_s: float, *, at_least: int = 3) -> list[float]:
    """Seconds of each run, after one that is not counted."""
    work()
    seconds: list[float] = []
    while len(seconds) < at_least or sum(seconds) < budget_s:
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return seconds


def measure_limits() -> Limits:
    bandwidth = {}
    for mib in (32, 64, 128, 256, 512, 1024):
        buffer = torch.ones(mib << 18)  # float32
        bandwidth[mib << 20] = (mib << 20) / min(repeated(buffer.sum, 0.5))
    ops = 2 * 2048**3
    left, right = torch.randn(2, 2048, 2048, dtype=torch.bfloat16)
    small = torch.randint(-8, 8, (2, 2048, 2048), dtype=torch.int8)
    return Limits(
        read_bandwidth=bandwidth,
        bfloat16_ops=ops / min(repeated(lambda: left @ right, 0.5)),
        int8_ops=ops / min(repeated(lambda: torch._int_mm(small[0], small[1]), 0.5)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What steps of a model must read and do."""

    config: ModelConfig
    weight_bytes: int
    kv_token_bytes: int

    @property
    def _layer_ops(self) -> int:
        """Of one token, all layers, without attention over the context."""
        config = self.config
        heads = 2 * config.num_attention_heads + 2 * config.num_kv_heads
        matrices = heads * config.head_dim + 3 * config.intermediate_size
        return 2 * config.num_layers * config.hidden_size * matrices

    def _attention_ops(self, num_pairs: float) -> float:
        config = self.config
        return 4 * config.num_layers * config.num_attention_heads * config.head_dim * num_pairs

    @property
    def _head_ops(self) -> int:
        return 2 * self.config.vocab_size * self.config.hidden_size

    def decode(self, batch: int, context: int) -> tuple[float, float]:
        """(bytes, operations) of one step."""
        ops = self._layer_ops + self._head_ops + self._attention_ops(context)
        return self.weight_bytes + batch * context * self.kv_token_bytes, batch * ops

    def prefill(self, length: int) -> tuple[float, float]:
        """Weights once, whatever the chunks."""
        pairs = length * (length + 1) / 2
        ops = length * self._layer_ops + self._head_ops + self._attention_ops(pairs)
        return self.weight_bytes + length * self.kv_token_bytes, ops


# -- the steps


class Steps:
    """One model in one weight format, with a filled KV pool."""

    def __init__(self, arguments: argparse.Namespace, weights: str, limits: Limits) -> None:
        say(f"loading {weights}")
        self._arguments = arguments
        self._weights = weights
        self._limits = limits
        self._runner = ModelRunner(
            EngineConfig(
                model_path=resolve_model(arguments.model).path,
                dtype="bfloat16",
                quantization=FORMATS[weights],
                kernels=arguments.kernels,
                num_threads=arguments.threads,
                cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=MAX_KV_TOKENS // BLOCK_SIZE),
            )
        )
        layout = self._runner.kv_cache.layout
        self._cost = Cost(
            config=self._runner.model_config,
            weight_bytes=self._runner.weight_bytes,
            kv_token_bytes=layout.bytes_per_block // BLOCK_SIZE,
        )
        self.max_model_len = self._runner.max_model_len
        self._fill_pool()

    def decode(self, batch: int, context: int) -> Point:
        step = Batch(sequences=tuple(decoding(i, context) for i in range(batch)))
        seconds = repeated(lambda: self._runner.execute(step), self._arguments.budget)
        return self._point("decode", batch, context, seconds, self._cost.decode(batch, context))

    def prefill(self, length: int) -> Point:
        steps = prefilling(length, self._arguments.chunk)

        def whole() -> None:
            for step in steps:
                self._runner.execute(step)

        seconds = repeated(whole, self._arguments.budget)
        return self._point("prefill", 1, length, seconds, self._cost.prefill(length))

    def _fill_pool(self) -> None:
        """Pages never written to would all be the one page of zeros, and be read from a cache."""
        pool = self._runner.kv_cache.tensor
        for layer in pool:
            layer.copy_(torch.randn(layer.shape[1:]).to(pool.dtype).expand(layer.shape))

    def _point(
        self, kind: str, batch: int, context: int, seconds: list[float], cost: tuple[float, float]
    ) -> Point:
        quantized = FORMATS[self._weights] is not None
        median = statistics.median(seconds)
        point = Point(
            weights=self._weights,
            kind=kind,
            batch=batch,
            context=context,
            median_ms=round(1e3 * median, 3),
            lowest_ms=round(1e3 * min(seconds), 3),
            limit_ms=round(1e3 * self._limits.seconds(*cost, quantized=quantized), 3),
            tok_s=round((batch if kind == "decode" else context) / median, 1),
        )
        say(f"  {table_row(point)}")
        return point


def decoding(index: int, context: int) -> ScheduledSequence:
    """Sequence `index` of a batch, with blocks of its own, at its last token of `context`."""
    num_blocks = -(-context // BLOCK_SIZE)
    return ScheduledSequence(
        request_id=str(index),
        token_ids=(1000 + index,),
        num_computed_tokens=context - 1,
        block_ids=tuple(range(index * num_blocks, (index + 1) * num_blocks)),
        samples=(SampleSpec(sampling=GREEDY, choice_index=0, position=context),),
    )


def prefilling(length: int, chunk: int) -> list[Batch]:
    """A prompt in the chunks that a scheduler would give it."""
    spec = SampleSpec(sampling=GREEDY, choice_index=0, position=length)
    return [
        Batch(
            sequences=(
                ScheduledSequence(
                    request_id="0",
                    token_ids=tuple(1000 + i % 997 for i in range(start, end)),
                    num_computed_tokens=start,
                    block_ids=tuple(range(-(-end // BLOCK_SIZE))),
                    samples=(spec,) if end == length else (),
                ),
            )
        )
        for start in range(0, length, chunk)
        for end in [min(length, start + chunk)]
    ]


# -- what comes out


HEADER = """\
| weights | step | batch | context | median ms | lowest | limit | of the limit | tok/s |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def table_row(point: Point) -> str:
    return (
        f"| {point.weights} | {point.kind} | {point.batch} | {point.context} "
        f"| {point.median_ms:.2f} | {point.lowest_ms:.2f} | {point.limit_ms:.2f} "
        f"| {point.share_of_limit:.0%} | {point.tok_s:.0f} |"
    )


def charts(points: list[Point]) -> list[Chart]:
    decode = [point for point in points if point.kind == "decode"]
    context = min(point.context for point in decode)
    at_context = [point for point in decode if point.context == context]
    alone = [point for point in decode if point.batch == 1]
    prefill = [point for point in points if point.kind == "prefill"]
    return [
        chart(f"decode step, context {context}", "batch", at_context, lambda point: point.batch),
        chart("decode step, batch 1", "context", alone, lambda point: point.context),
        chart("prefill", "prompt tokens", prefill, lambda point: point.context),
    ]


def chart(title: str, x_label: str, points: list[Point], x: Callable[[Point], int]) -> Chart:
    return Chart(
        title=title,
        x_label=x_label,
        y_label="ms",
        lines=lines(points, lambda p: (x(p), p.median_ms), lambda p: (x(p), p.limit_ms)),
    )


def lines(
    points: list[Point],
    measured: Callable[[Point], tuple[float, float]],
    limit: Callable[[Point], tuple[float, float]],
) -> list[Line]:
    found = []
    for colour, weights in enumerate(dict.fromkeys(point.weights for point in points)):
        some = [point for point in points if point.weights == weights]
        found += [
            Line(label=weights, points=[measured(point) for point in some], colour=colour),
            Line(label="", points=[limit(p) for p in some], colour=colour, is_limit=True),
        ]
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--formats", nargs="+", choices=tuple(FORMATS), default=list(FORMATS))
    parser.add_argument("--kernels", default="auto", help="auto, native or torch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens of one step at most")
    parser.add_argument(
        "--budget", type=float, default=0.5, help="seconds per point, at least 3 runs"
    )
    parser.add_argument("--quick", action="store_true", help="few small points: a trial")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.budget = 0.0
    return arguments


def sweep(steps: Steps, *, quick: bool) -> list[Point]:
    batches, contexts = (BATCHES[:3], CONTEXTS[:2]) if quick else (BATCHES, CONTEXTS)
    points = [
        steps.decode(batch, context)
        for context in contexts
        for batch in batches
        if context <= steps.max_model_len and batch * context <= MAX_KV_TOKENS
    ]
    lengths = LENGTHS[:3] if quick else LENGTHS
    return points + [steps.prefill(n) for n in lengths if n <= steps.max_model_len]


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    limits = measure_limits()
    say(f"limits: {limits}")
    points: list[Point] = []
    for weights in arguments.formats:
        points += sweep(Steps(arguments, weights, limits), quick=arguments.quick)
    table = "\n".join([HEADER, *map(table_row, points)]) + "\n"
    print(table)
    if arguments.out:
        result = {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "threads": arguments.threads,
            "kernels": arguments.kernels,
            "torch": torch.__version__,
            "load_average": [round(value, 2) for value in os.getloadavg()],
            "limits": asdict(limits),
            "points": [asdict(point) for point in points],
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(table)
        arguments.out.with_suffix(".svg").write_text(svg(charts(points)))


if __name__ == "__main__":
    main()
