"""Prefill and decode workers of unequal shapes: KV of one worker's ranks becomes that of another's,
and no token changes.

By default a few pairs that have every shape among them; `pytest tests/cluster/test_shapes.py
--all-shapes` runs all.
"""

import itertools

from core.config import ParallelConfig

PROMPTS = [list(range(1, 1 + n)) for n in (1, 16, 33, 70)]

SHAPES = {
    "tp1": ParallelConfig(),
    "tp2": ParallelConfig(tensor_parallel_size=2),
    "tp3": ParallelConfig(tensor_parallel_size=3),
    "tp4": ParallelConfig(tensor_parallel_size=4),
    "pp2": ParallelConfig(pipeline_parallel_size=2),
    "pp3": ParallelConfig(pipeline_parallel_size=3),
    "tp2pp2": ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2),
}
SHAPES_OF = {
    "tiny_model": ("tp1", "tp2", "tp4", "pp2", "tp2pp2"),
    "odd_model": ("tp1", "tp3", "pp2", "pp3"),
}
BLOCK_SIZES = ((16, 64), (64, 16))
"""Of the prefill and the decode worker: ranks, layers, heads and blocks are all cut anew."""
A_FEW = (
    ("tiny_model", "tp2", "pp2", (16, 64)),
    ("tiny_model", "tp1", "tp4", (64, 16)),
    ("tiny_model", "tp2pp2", "tp1", (16, 64)),
    ("odd_model", "pp3", "tp3", (64, 16)),
)


def all_cases():
    for model, shapes in SHAPES_OF.items():
        for prefill, decode in itertools.product(shapes, repeat=2):
            for block_sizes in BLOCK_SIZES:
                yield model, prefill, decode, block_sizes


def pytest_generate_tests(metafunc):
    cases = tuple(all_cases())
    assert set(A_FEW) <= set(cases)
    chosen = cases if metafunc.config.getoption("--all-shapes") else A_FEW
    names = [f"{model}-{p}-{d}-{sizes[0]}to{sizes[1]}" for model, p, d, sizes in chosen]
    metafunc.parametrize(("model", "prefill", "decode", "block_sizes"), chosen, ids=names)


async def test_any_shape_to_any_shape(
    request, cluster_of, greedy, model, prefill, decode, block_sizes
):
    """The second time both sides find the beginning in their caches."""
    model_path = request.getfixturevalue(model)
    expected = greedy(model_path, PROMPTS, 8)
    prefill_cache, decode_cache = ({"block_size": size, "num_blocks": 64} for size in block_sizes)
    async with cluster_of(
        model_path,
        prefill_parallel=SHAPES[prefill],
        decode_parallel=SHAPES[decode],
        prefill_cache=prefill_cache,
        decode_cache=decode_cache,
    ) as cluster:
        for _ in range(2):
            assert [await cluster.complete(prompt, 8) for prompt in PROMPTS] == expected
        await cluster.until_nothing_is_held(within_s=2)
