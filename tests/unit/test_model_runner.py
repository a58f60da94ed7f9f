"""The runner's own promises: sizes, limits, execute's order, and that what stands beside a sequence
does not change it."""

from dataclasses import replace

import pytest
import torch

from core.config import CacheConfig, EngineConfig, ParallelConfig
from core.errors import ConfigError, InternalError, ModelLoadError
from core.sampling_params import SamplingParams
from cpu_kernels.matmul import PANEL_ROWS
from engine.batch import Batch, SampleSpec, ScheduledSequence
from engine.executor import Executor, LocalExecutor
from engine.kv_cache import num_blocks_for
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner
from parallel.packed_weight import PackedWeight


@pytest.fixture(scope="module")
def folder(make_hf_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_hf_model("llama3").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def runner(folder, make_runner):
    return make_runner(folder)


def share(name, token_ids, block_ids, *, computed=0, **sampling):
    spec = SampleSpec(
        sampling=SamplingParams(**sampling), choice_index=0, position=computed + len(token_ids)
    )
    return ScheduledSequence(
        request_id=name,
        token_ids=tuple(token_ids),
        num_computed_tokens=computed,
        block_ids=tuple(block_ids),
        samples=(spec,) if sampling else (),
    )


def test_one_token_per_sampled_sequence_in_order(runner):
    a = share("a", [1, 2, 3], [0], temperature=0.0)
    b = share("b", [4, 5], [1])
    c = share("c", [6, 7, 8, 9, 10], [2, 3], temperature=1.0, seed=7)
    alone = [runner.execute(Batch(sequences=(s,)))[0] for s in (a, b, c)]
    assert [len(result.sampled) for result in alone] == [1, 0, 1]
    assert runner.execute(Batch(sequences=(c, b, a))) == (alone[2], alone[1], alone[0])


def test_logits_of_a_row_hardly_depend_on_the_batch(runner):
    sequences = [share(str(i), range(i, i + 9), [3 * i, 3 * i + 1, 3 * i + 2], temperature=0.0)
                 for i in range(12)]  # fmt: skip
    together = runner.logits(Batch(sequences=tuple(sequences)))
    assert together.dtype == torch.float32
    assert together.shape == (12, 101)
    for i, sequence in enumerate(sequences):
        alone = runner.logits(Batch(sequences=(sequence,)))
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=1e-5)


def test_cached_prefix_equals_computing_it(runner):
    """A second sequence that shares the first one's blocks goes on from them."""
    prompt = list(range(20, 32))
    runner.execute(Batch(sequences=(share("a", prompt[:8], [5, 9]),)))
    reused = share("b", prompt[8:], [5, 9, 40], computed=8, temperature=0.0)
    whole = share("c", prompt, [50, 51, 52], temperature=0.0)
    got, expected = (runner.logits(Batch(sequences=(s,))) for s in (reused, whole))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_cache_has_the_layout_it_announces(runner):
    cache, layout = runner.kv_cache, runner.kv_cache.layout
    assert cache.tensor.shape == (3, 2, 128, 2, 4, 8)
    assert cache.tensor.is_contiguous()
    assert cache.tensor.nbytes == layout.bytes_per_block * cache.num_blocks
    assert layout.model == f"{runner.model_config.fingerprint}-float32" != "-float32"


def test_num_blocks_wins_over_memory_bytes(runner):
    layout = runner.kv_cache.layout
    memory = 10 * layout.bytes_per_block + 1
    assert num_blocks_for(layout, CacheConfig(memory_bytes=memory)) == 10
    assert num_blocks_for(layout, CacheConfig(memory_bytes=memory, num_blocks=3)) == 3
    with pytest.raises(ConfigError, match="too few: a block takes 1536 bytes"):
        num_blocks_for(layout, CacheConfig(memory_bytes=2 * layout.bytes_per_block - 1))


def test_max_model_len(folder, make_runner, runner):
    assert runner.max_model_len == 256
    assert make_runner(folder, max_model_len=100).max_model_len == 100
    for wrong in (0, 257):
        with pytest.raises(ConfigError, match=f"max_model_len is {wrong}.*1 to 256"):
            make_runner(folder, max_model_len=wrong)


@pytest.mark.parametrize("shape", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_a_shape_that_this_group_is_not_is_refused(folder, shape):
    config = EngineConfig(model_path=folder, parallel=ParallelConfig(**shape))
    with pytest.raises(ConfigError, match=next(iter(shape))):
        ModelRunner(config)


def test_path_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="neither a GGUF file nor a folder"):
        ModelRunner(EngineConfig(model_path=str(tmp_path)))


def test_num_threads_is_set(folder):
    before = torch.get_num_threads()
    try:
        config = EngineConfig(model_path=folder, cache=CacheConfig(num_blocks=2))
        ModelRunner(replace(config, num_threads=before + 1))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_local_executor_is_an_executor(runner):
    executor: Executor = LocalExecutor(runner)
    assert executor.kv_cache is runner.kv_cache
    assert executor.layout == runner.kv_cache.layout
    assert executor.num_blocks == 128
    assert executor.max_model_len == 256
    assert executor.model_config.num_layers == 3
    batch = Batch(sequences=(share("a", [1, 2, 3], [0], temperature=0.0),))
    assert executor.execute(batch) == runner.execute(batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda:99"}, "device cuda:99 cannot be used here"),
        ({"cache": CacheConfig(memory_bytes=1)}, "at least 2 are needed"),
        ({"cache": CacheConfig(memory_bytes=1 << 50)}, "does not fit into the memory of cpu"),
        ({"max_model_len": 1 << 30}, "the model allows"),
    ],
)
def test_what_cannot_work_is_said_before_weights_are_loaded(folder, changes, message):
    loaded = []
    with pytest.raises(ConfigError, match=message):
        ModelRunner(
            EngineConfig(model_path=folder, **changes), progress=lambda *step: loaded.append(step)
        )
    assert "loading weights" not in [what for what, _ in loaded]


def embedding_row(weight, token_id):
    if isinstance(weight, PackedWeight):
        return weight.words.view(torch.float32)[token_id // PANEL_ROWS, :, token_id % PANEL_ROWS]
    return weight.values[token_id]


@pytest.mark.parametrize(
    ("kv_dtype", "num_blocks", "block_size"),
    [("float32", 4, 4), ("int8", 4, 4), ("float32", 2, 16)],
)
def test_what_is_no_number_spoils_nobody_after_it(
    tiny_model, make_request, engine_config, kv_dtype, num_blocks, block_size
):
    """A sequence whose KV holds NaN fails, and its blocks go clean to the next owner, who fills
    them only in part; nobody finds them by their prefix either."""
    config = engine_config(num_blocks=num_blocks, block_size=block_size, dtype=kv_dtype)
    engine = LLMEngine.from_config(replace(config, model_path=tiny_model))
    room = num_blocks * block_size
    request = make_request(range(room - 7), max_tokens=5)
    spoiled = make_request([*range(9, room + 4), 200, 3], max_tokens=2)
    [expected] = engine.generate([request])
    row = embedding_row(engine._executor._runner._model.model.embed_tokens.weight, 200)
    before = row.clone()
    row.fill_(float("nan"))
    with pytest.raises(InternalError):
        engine.generate([spoiled])
    row.copy_(before)
    assert engine.pool.check().free == num_blocks, "nothing of it can be found"
    assert engine.generate([request]) == [expected]
    [again] = engine.generate([spoiled])
    assert len(again.token_ids) == 2
