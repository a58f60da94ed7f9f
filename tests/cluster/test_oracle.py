"""The disaggregated cluster on the real default model equals HF transformers, token for token.

Prefill and decode are processes of their own and KV moves over gloo. By default a spread of rows
runs; `pytest tests/cluster/test_oracle.py --oracle-rows 220` runs them all.
"""

import asyncio

import pytest


@pytest.mark.timeout(1800)
async def test_cluster_equals_hf(cluster_of, smollm2_path, oracle_rows, same_as_oracle):
    async with cluster_of(smollm2_path, num_blocks=1024) as cluster:
        gate = asyncio.Semaphore(16)

        async def generate(prompt, count):
            async with gate:
                return await cluster.complete(prompt, count)

        ties = await asyncio.gather(*(same_as_oracle(row, generate) for row in oracle_rows))
        print(f"{len(oracle_rows)} rows equal, {sum(ties)} ties settled")
        await cluster.until_nothing_is_held(within_s=1)
