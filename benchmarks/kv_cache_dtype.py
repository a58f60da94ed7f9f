"""What each dtype of the KV cache costs in quality and takes in memory, on SmolLM2-135M.

    python benchmarks/kv_cache_dtype.py --out benchmarks/results/kv_cache_dtype.json

Weights and arithmetic are float32 throughout, so that the cache alone differs. Measured are

- perplexity of benchmarks/quality_text.txt and agreement with Hugging Face's float32 greedy tokens,
  as benchmarks/quality.py does for weights;
- `loss`: how far the logits after a prompt are from those over a float32 cache, the largest of all
  tokens, median and maximum over the prompts;
- `chunking`: the same between a prompt computed at once and in two chunks. Both read the cache's
  rounded numbers, but sums are taken in another order: what that tips over grows layer by layer;
- bytes of KV per token.

Speed is not measured: what reads the cache is the plain-torch reference.
"""

from __future__ import annotations

import argparse
import json
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
    TEXT,
    bundled_model,
    common_prefix,
    greedy,
    oracle_rows,
    pages,
    perplexity,
)
from core.config import CacheConfig, EngineConfig
from core.kv import KV_DTYPES
from engine.batch import Batch, SampleSpec, ScheduledSequence
from engine.model_runner import ModelRunner
from router.tokenizer import load_tokenizer


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
            block_ids=tuple(range(pages(len(prompt)))),
            samples=(SampleSpec(sampling=GREEDY, choice_index=0, position=end),),
        )
        logits = runner.logits(Batch(sequences=(share,)))
    return logits[0]


def farthest(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[float]:
    return [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]


def measure(
    runner: ModelRunner,
    rows: list[dict[str, list[int]]],
    text: list[int],
    exact: Sequence[Tensor],
) -> Measured:
    """`exact`: the logits after each prompt, over a float32 cache."""
    outputs, _ = greedy(runner, rows)
    equal = [common_prefix(ours, row["output"]) for ours, row in zip(outputs, rows, strict=True)]
    whole = [logits_after(runner, row["prompt"], len(row["prompt"])) for row in rows]
    halves = [logits_after(runner, row["prompt"], len(row["prompt"]) // 2 + 1) for row in rows]
    loss, chunking = farthest(whole, exact), farthest(whole, halves)
    return Measured(
        bytes_per_token=runner.kv_cache.layout.bytes_per_block // BLOCK_SIZE,
        perplexity=perplexity(runner, text),
        equal_tokens=sum(equal) / sum(len(row["output"]) for row in rows),
        equal_prompts=sum(n == len(row["output"]) for n, row in zip(equal, rows, strict=True))
        / len(rows),
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
    parser = argparse.ArgumentParser(description="Quality and memory of each KV cache dtype.")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    path = bundled_model()
    rows = oracle_rows(arguments.prompts, arguments.tokens)
    text = load_tokenizer(path).encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=True)
    num_blocks = max(pages(len(text)), sum(pages(len(r["prompt"] + r["output"])) for r in rows))
    print(f"{len(text)} tokens of text, {len(rows)} prompts, {arguments.tokens} tokens each")
    print(
        "| KV cache | bytes per token | perplexity | equal tokens | equal prompts "
        "| loss median, max | chunking median, max |\n|" + " --- |" * 7
    )
    results: dict[str, dict[str, float]] = {}
    exact: list[Tensor] = []
    for dtype in KV_DTYPES:
        cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, dtype=dtype)
        runner = ModelRunner(EngineConfig(model_path=path, cache=cache))
        exact = exact or [logits_after(runner, row["prompt"], len(row["prompt"])) for row in rows]
        found = measure(runner, rows, text, exact)
        results[dtype] = asdict(found)
        print_row(dtype, found)
    if arguments.out is not None:
        workload = {"text_tokens": len(text), "prompts": len(rows), "tokens": arguments.tokens}
        found_all = {"workload": workload, "kv_cache_dtype": results}
        arguments.out.write_text(json.dumps(found_all, indent=2) + "\n")


if __name__ == "__main__":
    main()
