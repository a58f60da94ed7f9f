"""What each dtype of the KV cache costs in quality and takes in memory, on SmolLM2-135M.

    python benchmarks/kv_cache_dtype.py --out benchmarks/results/kv_cache_dtype.json

Weights and arithmetic are float32 throughout, so that the cache alone differs. Measured are

- perplexity of benchmarks/quality_text.txt and agreement with Hugging Face's float32 greedy tokens,
  as benchmarks/quality.py does for weights;
- `loss`: how far the logits after a prompt are from those over a float32 cache, the largest of all
  tokens, median and maximum over the prompts;
- `chunking`: the same between a prompt computed at once and in two chunks. Exactly 0 where the CPU
  kernels attend, since they never change the order of a sum; fp8 is attended to by torch;
- bytes of KV per token.

Speed is measured in benchmarks/serve.py.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.quality import (
    BLOCK_SIZE,
    GREEDY,
    Workload,
    agreement,
    blocks_of,
    load_workload,
    parse,
    perplexity,
    write_results,
)
from core.config import CacheConfig, EngineConfig
from core.kv import KV_DTYPE_BYTES
from engine.batch import Batch, SampleSpec, ScheduledSequence
from engine.model_runner import ModelRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    bytes_per_token: int
    perplexity: float
    equal_tokens: float
    """Share of the reference's tokens before the first that differs."""
    equal_prompts: float
    loss_median: float
    loss_max: float
    chunking_median: float
    chunking_max: float


def logits_after(runner: ModelRunner, prompt: Sequence[int], chunk: int) -> Tensor:
    """[vocab_size], computed `chunk` tokens at a time."""
    for start in range(0, len(prompt), chunk):
        end = min(start + chunk, len(prompt))
        share = ScheduledSequence(
            request_id="prompt",
            token_ids=tuple(prompt[start:end]),
            num_computed_tokens=start,
            block_ids=tuple(range(blocks_of(len(prompt)))),
            samples=(SampleSpec(sampling=GREEDY, choice_index=0, position=end),),
        )
        logits = runner.logits(Batch(sequences=(share,)))
    return logits[0]


def farthest(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[float]:
    return [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]


def measure(runner: ModelRunner, work: Workload, exact: Sequence[Tensor]) -> Measured:
    """`exact`: the logits after each prompt, over a float32 cache."""
    equal_tokens, equal_prompts = agreement(runner, work.rows)
    prompts = [row.prompt for row in work.rows]
    whole = [logits_after(runner, prompt, len(prompt)) for prompt in prompts]
    halves = [logits_after(runner, prompt, len(prompt) // 2 + 1) for prompt in prompts]
    loss, chunking = farthest(whole, exact), farthest(whole, halves)
    return Measured(
        bytes_per_token=runner.kv_cache.layout.bytes_per_block // BLOCK_SIZE,
        perplexity=perplexity(runner, work.text),
        equal_tokens=equal_tokens,
        equal_prompts=equal_prompts,
        loss_median=statistics.median(loss),
        loss_max=max(loss),
        chunking_median=statistics.median(chunking),
        chunking_max=max(chunking),
    )


def print_row(dtype: str, found: Measured) -> None:
    print(
        f"| {dtype} | {found.bytes_per_token} | {found.perplexity:.3f} | {found.equal_tokens:.1%} "
        f"| {found.equal_prompts:.0%} | {found.loss_median:.2g}, {found.loss_max:.2g} "
        f"| {found.chunking_median:.2g}, {found.chunking_max:.2g} |",
        flush=True,
    )


def main() -> None:
    arguments = parse("Quality and memory of each KV cache dtype.", num_prompts=16)
    work = load_workload(arguments)
    print(
        "| KV cache | bytes per token | perplexity | equal tokens | equal prompts "
        "| loss median, max | chunking median, max |\n|" + " --- |" * 7
    )
    results: dict[str, dict[str, float]] = {}
    exact: list[Tensor] = []
    for dtype in KV_DTYPE_BYTES:
        cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=work.num_blocks, dtype=dtype)
        runner = ModelRunner(EngineConfig(model_path=work.model, cache=cache))
        exact = exact or [logits_after(runner, row.prompt, len(row.prompt)) for row in work.rows]
        found = measure(runner, work, exact)
        results[dtype] = asdict(found)
        print_row(dtype, found)
    write_results(arguments, work, kv_cache_dtype=results)


if __name__ == "__main__":
    main()
