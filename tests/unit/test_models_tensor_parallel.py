"""Tensor parallelism over real gloo collectives equals transformers on one rank.

The ranks are threads: each owns its group and there is no global state to share, so processes would
prove nothing more.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from core.config import ParallelConfig
from core.errors import ConfigError
from parallel.collectives import gloo_group

TIMEOUT_S = 30.0


@pytest.fixture
def on_ranks():
    """Run a function of a group on every rank at once; results by rank."""

    def run(size, function):
        store = HashStore()
        groups = []  # kept to the end: a rank that leaves early breaks its peers

        def work(rank):
            group = gloo_group(store, rank, size, TIMEOUT_S)
            groups.append(group)
            return function(group)

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(work, range(size)))

    return run


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama2", 2),
        ("llama2", 3),
        ("mixtral", 2),
        ("qwen2-moe", 2),
        ("qwen3-moe", 2),
        ("llama3", 6),  # 2 kv heads: each is held by three ranks
        ("llama-bias", 2),
        ("qwen2", 2),
        ("qwen3-bias", 2),
        ("smollm3", 2),
        ("gemma2", 2),
        ("gemma3", 6),
        ("granite-bias", 2),
        ("olmo2", 2),
        ("olmo2", 6),  # the norm of k spans ranks that hold copies
        ("phi3", 2),  # the parts of q, k and v are split after the file's one tensor
    ],
)
def test_ranks_together_equal_transformers(
    name, size, on_ranks, make_hf_model, make_runner, drive, prompts, assert_equals_hf, tmp_path
):
    model = make_hf_model(name)
    model.save_pretrained(tmp_path)

    def work(group):
        shape = ParallelConfig(tensor_parallel_size=size)
        runner = make_runner(str(tmp_path), group=group, parallel=shape)
        return runner, drive(runner, prompts, num_tokens=6)

    results = on_ranks(size, work)
    for runner, rows in results:
        assert_equals_hf(rows, model)
        assert runner.kv_cache.layout.num_kv_heads == max(
            1, model.config.num_key_value_heads // size
        )
    tokens = [[row.tokens for row in rows] for _, rows in results]
    assert all(rank == tokens[0] for rank in tokens)


def test_heads_that_cannot_be_split_are_refused(on_ranks, make_hf_model, make_runner, tmp_path):
    make_hf_model("llama3").save_pretrained(tmp_path)

    def work(group):
        shape = ParallelConfig(tensor_parallel_size=4)
        with pytest.raises(ConfigError, match="6 attention heads cannot be split over 4"):
            make_runner(str(tmp_path), group=group, parallel=shape)

    on_ranks(4, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives(on_ranks, dtype):
    def work(group):
        mine = torch.full((2, 3), float(group.rank + 1), dtype=dtype)
        return group.all_gather(mine), group.all_reduce(mine.clone().t())

    for gathered, total in on_ranks(3, work):
        assert gathered.shape == (3, 2, 3)
        assert gathered[:, 0, 0].tolist() == [1.0, 2.0, 3.0]
        assert total.shape == (3, 2)
        assert total.unique().tolist() == [6.0]
