"""The disaggregated cluster on the real default model equals HF transformers, token for token.

Prefill and decode are processes of their own and KV moves over gloo. By default a spread of rows
runs; `pytest tests/cluster/test_oracle.py --oracle-rows 220` runs them all.
"""

import asyncio

import pytest

from core.config import ParallelConfig

SHAPES = {
    "one rank each": {},
    "tp3 to pp3 and blocks of 64": {
        "prefill_parallel": ParallelConfig(tensor_parallel_size=3),
        "decode_parallel": ParallelConfig(pipeline_parallel_size=3),
        "decode_cache": {"block_size": 64, "num_blocks": 256},
    },
}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("shape", SHAPES)
async def test_cluster_equals_hf(cluster_of, smollm2_path, oracle_rows, same_as_oracle, shape):
    async with cluster_of(smollm2_path, num_blocks=1024, **SHAPES[shape]) as cluster:
        gate = asyncio.Semaphore(16)

        async def generate(prompt, count):
            async with gate:
                return await cluster.complete(prompt, count)

        ties = await asyncio.gather(*(same_as_oracle(row, generate) for row in oracle_rows))
        print(f"{len(oracle_rows)} rows equal, {sum(ties)} ties settled")
        await cluster.until_nothing_is_held(within_s=1)
