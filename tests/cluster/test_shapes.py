"""Prefill and decode workers of unequal shapes: KV of one worker's ranks becomes that of another's,
and no token changes."""

import pytest

from core.config import CacheConfig, EngineConfig, ParallelConfig
from core.request import GenerateRequest
from core.sampling_params import SamplingParams
from engine.llm_engine import LLMEngine

PROMPTS = [list(range(1, 1 + n)) for n in (1, 16, 33, 70)]


def shape(tp=1, pp=1):
    return ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)


PAIRS = {
    "tp2 to tp1": (shape(tp=2), shape()),
    "tp1 to tp2": (shape(), shape(tp=2)),
    "tp2 to pp2": (shape(tp=2), shape(pp=2)),
    "pp2 to tp2": (shape(pp=2), shape(tp=2)),
    "tp4 to tp2": (shape(tp=4), shape(tp=2)),
    "tp2pp2 to tp2pp2": (shape(tp=2, pp=2), shape(tp=2, pp=2)),
}


@pytest.fixture(scope="module")
def expected(tiny_model):
    """By one engine on one rank."""
    cache = CacheConfig(block_size=16, num_blocks=64)
    engine = LLMEngine.from_config(EngineConfig(model_path=tiny_model, cache=cache))
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    requests = [
        GenerateRequest(
            request_id=f"{i}", model="m", prompt_token_ids=tuple(prompt), sampling=sampling
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    return [list(chunk.token_ids) for chunk in engine.generate(requests)]


@pytest.mark.parametrize("pair", PAIRS)
async def test_any_shape_to_any_shape(cluster_of, tiny_model, expected, pair):
    """The second time both sides find the beginning in their caches. Blocks of 16 become blocks of
    64 on the way, so ranks, layers, heads and blocks are all cut anew."""
    prefill, decode = PAIRS[pair]
    async with cluster_of(
        tiny_model,
        prefill_parallel=prefill,
        decode_parallel=decode,
        decode_cache={"block_size": 64, "num_blocks": 32},
    ) as cluster:
        for _ in range(2):
            assert [await cluster.complete(prompt, 8) for prompt in PROMPTS] == expected
        await cluster.until_nothing_is_held(within_s=2)
