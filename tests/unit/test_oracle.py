"""LLMEngine on the real default model in float32 equals HF transformers, token for token.

By default a spread of rows runs; `pytest tests/unit/test_oracle.py --oracle-rows 220` runs all.
"""

from dataclasses import replace

import pytest

from core.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.llm_engine import LLMEngine


@pytest.fixture(scope="module")
def engine(smollm2_path):
    return LLMEngine.from_config(
        EngineConfig(
            model_path=smollm2_path,
            num_threads=2,
            cache=CacheConfig(block_size=16, num_blocks=1024),
            scheduler=SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=32),
        )
    )


async def test_greedy_tokens_equal_hf(engine, oracle_rows, same_as_oracle, make_request):
    """All rows in one batch, so that chunks, decodes and prefix hits mix."""

    def ask(prompt, max_tokens, request_id="again"):
        request = make_request(prompt, request_id=request_id, max_tokens=max_tokens)
        return replace(request, sampling=replace(request.sampling, ignore_eos=True))

    outputs = engine.generate(
        [
            ask(row["prompt_token_ids"], len(row["output_token_ids"]), str(i))
            for i, row in enumerate(oracle_rows)
        ]
    )
    ties = 0
    for row, output in zip(oracle_rows, outputs, strict=True):
        first = [list(output.token_ids)]

        async def generate(prompt, count, first=first):
            return (
                first.pop() if first else list(engine.generate([ask(prompt, count)])[0].token_ids)
            )

        ties += await same_as_oracle(row, generate)
    print(f"{len(oracle_rows)} rows equal, {ties} ties settled")
    counts = engine.pool.check()
    assert counts.owned == 0
