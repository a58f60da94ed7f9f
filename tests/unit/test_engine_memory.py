"""Memory: nothing grows with the number of requests, and loading costs weights + KV pool."""

import gc
import json
import random
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from engine.executor import LocalExecutor
from engine.llm_engine import LLMEngine

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_10_000_requests_leave_no_memory_behind(
    tiny_model, make_runner, make_request, engine_config
):
    """All ways through the engine: shared prefixes, choices, penalties, aborts, preemptions."""
    config = engine_config(num_blocks=96, max_num_seqs=32, max_num_batched_tokens=256)
    engine = LLMEngine(config, LocalExecutor(make_runner(tiny_model, num_blocks=96)))
    rng = random.Random(0)
    process = psutil.Process()

    def add(index):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        sampling = rng.choice(
            [
                {},
                {"num_choices": 2},
                {"temperature": 1.0, "top_p": 0.9, "seed": index},
                {"repetition_penalty": 1.3, "logprobs": 2, "prompt_logprobs": 1},
            ]
        )
        max_tokens = rng.randint(1, 4)
        engine.add_request(
            make_request(prompt, request_id=f"{index}", max_tokens=max_tokens, **sampling)
        )
        if rng.random() < 0.1:
            engine.abort(f"{rng.randint(max(0, index - 20), index)}")

    def serve(start, end):
        for index in range(start, end):
            add(index)
            if index % 24 == 0:
                while engine.has_unfinished_requests:
                    engine.step()
        while engine.has_unfinished_requests:
            engine.step()
        gc.collect()
        return process.memory_info().rss, len(gc.get_objects())

    serve(0, 2_000)  # allocators and caches have seen every kind of step by now
    rss, objects = serve(2_000, 3_000)
    rss_after, objects_after = serve(3_000, 10_000)
    counts = engine.pool.check()
    assert counts.free + counts.cached == 96
    assert objects_after - objects < 500, "objects per request would be 7,000 or more"
    assert rss_after - rss < 8 * MIB, "1.2 kB per request would be 8 MiB"


LOAD = """
import json, resource, sys
from core.config import CacheConfig, EngineConfig
from engine.model_runner import ModelRunner
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
imports = peak()
runner = ModelRunner(
    EngineConfig(model_path=sys.argv[1], dtype=sys.argv[2], cache=CacheConfig(num_blocks=100))
)
print(json.dumps({"imports": imports, "peak": peak(), "weights": runner.weight_bytes,
    "pool": runner.kv_cache.tensor.numel() * runner.kv_cache.tensor.element_size()}))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_takes_the_weights_the_pool_and_little_more(smollm2_path, dtype):
    """Peak, not only afterwards: no tensor of the file is ever there a second time as a whole."""
    command = [sys.executable, "-c", LOAD, smollm2_path, dtype]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    seen = json.loads(done.stdout)
    mapped = Path(smollm2_path).stat().st_size  # read through the page cache: counts as resident
    beyond = seen["peak"] - seen["imports"] - seen["weights"] - seen["pool"] - mapped
    assert seen["weights"] > 260_000_000
    assert beyond < 40 * MIB, f"{beyond / MIB:.0f} MiB beyond weights, pool and file"
