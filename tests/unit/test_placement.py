"""deploy.placement: bundles that Ray is asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import ClusterConfig, EngineConfig, ParallelConfig, RouterConfig, WorkerPool
from deploy.placement import Bundle, place_worker, total_resources


def engine(tp=1, pp=1, threads=2, device="cpu"):
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    return EngineConfig(model_path="m", num_threads=threads, device=device, parallel=parallel)


def test_one_bundle_per_rank():
    placement = place_worker(engine(tp=2, threads=3))
    assert placement.bundles == (Bundle(cpus=3, gpus=0),) * 2
    assert placement.strategy == "STRICT_PACK"


def test_a_rank_on_cuda_takes_a_whole_device():
    placement = place_worker(engine(tp=4, threads=1, device="cuda"))
    assert [bundle.resources() for bundle in placement.bundles] == [{"CPU": 1.0, "GPU": 1.0}] * 4


@pytest.mark.parametrize(("pp", "strategy"), [(1, "STRICT_PACK"), (2, "PACK")])
def test_only_pipeline_stages_may_be_spread(pp, strategy):
    assert place_worker(engine(tp=2, pp=pp)).strategy == strategy


def pools(max_count=8):
    shapes = st.builds(
        ParallelConfig,
        tensor_parallel_size=st.integers(1, 8),
        pipeline_parallel_size=st.integers(1, 4),
    )
    return st.builds(WorkerPool, count=st.integers(1, max_count), parallel=shapes)


@given(pools(), pools(), st.booleans())
def test_total_is_enough_for_every_worker_and_not_more(prefill, decode, cuda):
    config = ClusterConfig(
        router=RouterConfig(served_model_name="m", model_path="m"),
        engine=engine(threads=2, device="cuda:0" if cuda else "cpu"),
        prefill=prefill,
        decode=decode,
    )
    ranks = sum(pool.count * pool.parallel.world_size for pool in (prefill, decode))
    assert config.num_ranks == ranks
    assert total_resources(config) == Bundle(cpus=2 * ranks, gpus=ranks if cuda else 0)


def test_zero_amounts_are_not_asked_for():
    assert Bundle(cpus=1, gpus=0).resources() == {"CPU": 1.0}
