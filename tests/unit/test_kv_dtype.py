"""What a KV cache of each dtype keeps of a row, and that no schedule can be told from the outputs:
chunks, cache hits, copies and hand-overs all read the same rounded numbers."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from core.config import CacheConfig, EngineConfig, SchedulerConfig
from core.errors import ConfigError
from core.kv import KV_DTYPE_BYTES, KVLayout
from core.sampling_params import SamplingParams
from cpu_kernels.kv_dtype import KV_DTYPES
from deploy.config_file import engine_config, load_settings
from deploy.model_source import ResolvedModel
from engine.batch import Batch, BlockCopy, SampleSpec, ScheduledSequence
from engine.kv_cache import KVCache
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner
from kv_transfer.pack import StagingBuffer, digest, gather, scatter
from kv_transfer.plan import message_layout

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 4, 200
INT8, FP8 = KV_DTYPES["int8"], KV_DTYPES["fp8"]
ROUNDED = [name for name in KV_DTYPE_BYTES if name != "float32"]
SCALED = [name for name, kv_dtype in KV_DTYPES.items() if kv_dtype.is_scaled]
GXX = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

rows_of_numbers = arrays(
    "float32",
    st.tuples(st.integers(1, 5), st.integers(1, 4).map(lambda n: 4 * n)),
    elements=st.floats(-(2.0**100), 2.0**100, width=32),
).map(torch.from_numpy)


def read_back(name, rows):
    kv_dtype = KV_DTYPES[name]
    return kv_dtype.decode(kv_dtype.encode(rows), torch.float32)


@settings(deadline=None)
@given(rows_of_numbers)
def test_int8_is_wrong_by_half_a_step_at_most(rows):
    step = rows.abs().amax(-1, keepdim=True) / 127
    assert ((read_back("int8", rows) - rows).abs() <= step * 0.5001 + 1e-38).all()


@settings(deadline=None)
@given(rows_of_numbers)
def test_fp8_keeps_four_bits_of_each_number_and_more_of_none_than_the_least_step(rows):
    least_step = rows.abs().amax(-1, keepdim=True) / 448 * 2.0**-9
    allowed = torch.maximum(rows.abs() * 2.0**-4, least_step * 0.5) * 1.001 + 1e-38
    assert ((read_back("fp8", rows) - rows).abs() <= allowed).all()


@pytest.mark.parametrize("name", KV_DTYPE_BYTES)
@settings(deadline=None)
@given(rows=rows_of_numbers)
def test_a_row_depends_on_nothing_beside_it_and_reads_the_same_once_stored(name, rows):
    kv_dtype = KV_DTYPES[name]
    together = kv_dtype.encode(rows)
    assert together.dtype == kv_dtype.storage
    assert torch.equal(together, torch.cat([kv_dtype.encode(row[None]) for row in rows]))
    read = kv_dtype.decode(together, torch.float32)
    if name != "fp8":  # whose largest number times the scale may round up, and the scale with it
        assert torch.equal(read, read_back(name, read))
    if name == "float32":
        assert torch.equal(read, rows)


@pytest.mark.parametrize("name", SCALED)
def test_zeros_tiny_and_huge_numbers(name):
    assert not read_back(name, torch.zeros(3, 8)).any()
    assert read_back(name, torch.full((1, 8), 1e-44)).isfinite().all()
    for edge in (1e-30, 3.4e38):
        torch.testing.assert_close(read_back(name, torch.full((1, 8), edge))[0, 0].item(), edge)
    assert not KV_DTYPES[name].decode(torch.zeros(2, 12, dtype=KV_DTYPES[name].storage),
                                      torch.float32).any()  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_hidden(name, bad):
    """Its sequence must fail, not go on with a number that looks right; its neighbours go on."""
    rows = torch.ones(3, 8)
    rows[1, 5] = bad
    read = read_back(name, rows)
    assert read[1].isnan().all()
    assert torch.equal(read[[0, 2]], rows[[0, 2]])


@pytest.mark.parametrize("name", SCALED)
def test_bfloat16_rows_are_scaled_in_float32(name):
    rows = torch.randn(50, 16).bfloat16()
    kv_dtype = KV_DTYPES[name]
    stored = kv_dtype.encode(rows)
    assert torch.equal(stored, kv_dtype.encode(rows.float()))
    read = kv_dtype.decode(stored, torch.bfloat16)
    assert torch.equal(read, kv_dtype.decode(stored, torch.float32).bfloat16())


def make_layout(dtype, head_dim=64):
    return KVLayout(
        model="m",
        dtype=dtype,
        block_size=16,
        first_layer=0,
        num_layers=2,
        num_kv_heads=3,
        head_dim=head_dim,
    )


def test_both_tables_name_the_same_types():
    assert set(KV_DTYPE_BYTES) == set(KV_DTYPES)
    assert len({kv_dtype.storage for kv_dtype in KV_DTYPES.values()}) == len(KV_DTYPES)


@pytest.mark.parametrize(
    ("dtype", "row_bytes"), [("float32", 256), ("bfloat16", 128), ("int8", 68), ("fp8", 68)]
)
def test_a_cache_takes_the_bytes_its_layout_says(dtype, row_bytes):
    layout = make_layout(dtype)
    assert layout.row_bytes == row_bytes
    cache = KVCache(layout, CacheConfig(memory_bytes=1_000_000), device=CPU)
    assert cache.num_blocks == 1_000_000 // layout.bytes_per_block
    assert cache.tensor.nbytes == cache.num_blocks * layout.bytes_per_block
    assert layout.bytes_per_block == 2 * 2 * 3 * 16 * row_bytes


@pytest.mark.parametrize("dtype", SCALED)
def test_a_head_dim_that_leaves_no_scale_aligned_is_refused(dtype):
    with pytest.raises(ConfigError, match=f"{dtype} needs a head_dim divisible by 4.* is 6"):
        KVCache(make_layout(dtype, head_dim=6), CacheConfig(num_blocks=2), device=CPU)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match="auto, float32, bfloat16, int8, fp8, not 'int4'"):
        CacheConfig(dtype="int4")


def test_an_operator_can_say_it():
    model = ResolvedModel(path="m.gguf", served_name="m")

    def of(**env):
        return engine_config(load_settings(flags={}, env=env), model).cache.dtype

    assert of() == "auto"
    assert of(TWOSTROKE_KV_CACHE_DTYPE="int8") == "int8"
    with pytest.raises(ConfigError, match="--kv-cache-dtype: 'int2' is not one of auto, float32"):
        load_settings(flags={"kv_cache_dtype": "int2"}, env={})


@pytest.fixture(scope="module")
def folder(make_hf_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_hf_model("llama3").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def whole_vectors(make_hf_model, tmp_path_factory):
    """A model with heads that the CPU kernels attend to."""
    path = tmp_path_factory.mktemp("whole_vectors")
    make_hf_model("llama3", head_dim=16).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def make_runner_of(folder):
    def make(kv_dtype, **config):
        cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, dtype=kv_dtype)
        return ModelRunner(EngineConfig(model_path=folder, cache=cache, **config))

    return make


@pytest.fixture(scope="module")
def runners(make_runner_of):
    return {name: make_runner_of(name) for name in KV_DTYPE_BYTES}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_is_the_engines_dtype(make_runner_of, dtype):
    assert make_runner_of("auto", dtype=dtype).kv_cache.layout.dtype == dtype


def share(tokens, block_ids, computed=0):
    spec = SampleSpec(
        sampling=SamplingParams(temperature=0.0), choice_index=0, position=len(tokens)
    )
    return ScheduledSequence(
        request_id="r",
        token_ids=tuple(tokens[computed:]),
        num_computed_tokens=computed,
        block_ids=tuple(block_ids),
        samples=(spec,),
    )


def compute(runner, tokens, block_ids, computed=0, copies=()):
    """Logits [vocab_size] after `tokens`, the first `computed` of which are in the cache."""
    batch = Batch(sequences=(share(tokens, block_ids, computed),), block_copies=tuple(copies))
    return runner.logits(batch)[0]


def greedy(runner, tokens, block_ids, count, computed):
    """(tokens, logits) of `count` decode steps, one position at a time."""
    tokens, logits = list(tokens), []
    for _ in range(count):
        logits.append(compute(runner, tokens, block_ids, computed))
        computed = len(tokens)
        tokens.append(int(logits[-1].argmax()))
    return tokens, torch.stack(logits)


WORST = {"float32": 1e-4, "bfloat16": 2e-3, "int8": 0.03, "fp8": 0.03}
"""Sums taken in another order differ by 1e-5. Now and then that makes one number of one row round
the other way: by a step of that number, a fraction of the loss that all numbers have together."""


def assert_same_up_to_rounding(name, got, expected):
    worst = (torch.stack(list(got)) - torch.stack(list(expected))).abs().amax(-1)
    assert worst.max() < WORST[name]
    return worst


@pytest.mark.parametrize("name", KV_DTYPE_BYTES)
def test_no_chunking_or_mixture_can_be_told_from_the_outputs(runners, drive, prompts, name):
    """What decode and chunks read from the cache, a prefill of everything at once sees too."""
    runner = runners[name]
    runs = [drive(runner, prompts, seed=seed) for seed in (1, 2)]
    for rows in runs:
        whole = [
            compute(runner, row.tokens[: len(row.prompt) + i], range(20))
            for row in rows
            for i in range(len(row.logits))
        ]
        logits = [logits for row in rows for logits in row.logits]
        worst = assert_same_up_to_rounding(name, logits, whole)
        assert worst.median() < 1e-4, "most rows saw the very same numbers"
    assert [row.tokens for row in runs[0]] == [row.tokens for row in runs[1]]


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("bfloat16", 1e-2, 0.1), ("int8", 5e-2, 0.3), ("fp8", 0.2, 1.5)],
)
def test_the_loss_is_there_and_small(runners, prompts, name, least, most):
    """And so larger than what the other tests allow: they would see an unrounded key."""
    losses = []
    for prompt in prompts[2:]:
        exact, rounded = (compute(runners[dtype], prompt, range(20)) for dtype in ("float32", name))
        losses.append((exact - rounded).abs().max())
    assert least < torch.stack(losses).median() < most


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("computed", [8, 39])
def test_a_cached_prefix_equals_computing_it(runners, prompts, name, computed):
    runner, prompt = runners[name], prompts[5]
    expected, there = greedy(runner, prompt, range(20), 12, 0)
    compute(runner, prompt[:computed], range(50, 60))
    got, here = greedy(runner, prompt, [*range(50, 60), *range(70, 80)], 12, computed)
    assert got == expected
    assert_same_up_to_rounding(name, here, there)


@pytest.mark.parametrize("name", ROUNDED)
def test_a_copied_block_is_the_block(runners, prompts, name):
    """Copy-on-write: rows go with their scales, and the source stays as it was."""
    runner, prompt = runners[name], prompts[4]
    compute(runner, prompt, range(5))
    expected = compute(runner, [*prompt, 7], range(5), len(prompt))
    before = runner.kv_cache.tensor[:, :, 4].clone()
    table = [0, 1, 2, 3, 99]
    copied = compute(runner, [*prompt, 7], table, len(prompt), [BlockCopy(4, 99)])
    assert torch.equal(copied, expected)
    assert torch.equal(runner.kv_cache.tensor[:, :, 4], before)


@pytest.mark.parametrize("name", KV_DTYPE_BYTES)
def test_a_hand_over_moves_numbers_and_scales(runners, make_runner_of, prompts, name):
    prefill, decode, prompt = runners[name], make_runner_of(name), prompts[6]
    expected, there = greedy(prefill, prompt, range(20), 12, 0)
    first = int(compute(prefill, prompt, range(20)).argmax())
    sources, targets = range(16), range(100, 132, 2)
    layout, positions = prefill.kv_cache.layout, range(16 * BLOCK_SIZE)
    message = StagingBuffer(layout, CPU).message(positions)
    gather(prefill.kv_cache.tensor, layout, sources, positions, message, layout)
    assert message.nbytes == 16 * layout.bytes_per_block
    assert len(digest(message)) == 16
    scatter(message, layout, decode.kv_cache.tensor, layout, targets, positions)
    table = [*targets, 1, 2, 3, 4]
    got, here = greedy(decode, [*prompt, first], table, 11, len(prompt))
    assert got == expected
    assert_same_up_to_rounding(name, here, there[1:])


@GXX
@pytest.mark.parametrize("owner", ["torch", "native"])
def test_a_hand_over_between_torch_and_the_kernels(make_runner, whole_vectors, prompts, owner):
    """A worker with kernels and one without: each goes on with what the other has stored."""
    prompt = prompts[6]
    num_blocks = -(-len(prompt) // 16)
    runners = {
        kernels: make_runner(whole_vectors, kernels=kernels, block_size=16, kv_dtype="int8")
        for kernels in ("torch", "native")
    }
    source, target = runners.pop(owner), *runners.values()
    compute(source, prompt, range(num_blocks))
    expected = compute(source, [*prompt, 7], range(num_blocks + 1), len(prompt))
    there, here = source.kv_cache.layout, target.kv_cache.layout
    assert {there.inner_order, here.inner_order} == {"plain", "tiles16"}
    positions, targets = range(len(prompt)), range(50, 50 + num_blocks)
    layout = message_layout(there, here)
    message = StagingBuffer(layout, CPU).message(positions)
    gather(source.kv_cache.tensor, there, range(num_blocks), positions, message, layout)
    scatter(message, layout, target.kv_cache.tensor, here, targets, positions)
    got = compute(target, [*prompt, 7], [*targets, 90], len(prompt))
    assert_same_up_to_rounding("int8", [got], [expected])


@pytest.mark.parametrize(
    ("name", "kernels", "block_size"),
    [
        *((name, "torch", BLOCK_SIZE) for name in SCALED),
        pytest.param("int8", "native", 16, marks=GXX),
    ],
)
def test_the_engines_tokens_depend_on_no_chunk_cache_hit_or_preemption(
    whole_vectors, make_request, prompts, name, kernels, block_size
):
    def engine(chunk, *, num_tokens, **cache):
        num_blocks = num_tokens // block_size
        return LLMEngine.from_config(
            EngineConfig(
                model_path=whole_vectors,
                kernels=kernels,
                cache=CacheConfig(
                    block_size=block_size, dtype=name, num_blocks=num_blocks, **cache
                ),
                scheduler=SchedulerConfig(max_num_batched_tokens=chunk),
            )
        )

    stem = prompts[5][:30]
    requests = [
        make_request([*stem, *prompt], request_id=str(i), max_tokens=24, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    plain = engine(512, num_tokens=800, enable_prefix_caching=False)
    expected = [plain.generate([request])[0].token_ids for request in requests]
    chunked, tight = engine(11, num_tokens=800), engine(64, num_tokens=128)
    for run in (chunked, chunked, tight):
        assert [chunk.token_ids for chunk in run.generate(requests)] == expected
    assert tight.kv_usage.num_preemptions > 0


def test_two_types_have_layouts_of_their_own(runners):
    int8, fp8 = (runners[name].kv_cache.layout for name in ("int8", "fp8"))
    assert int8.bytes_per_block == fp8.bytes_per_block
    assert int8.difference(fp8) == "dtype differs: int8 here, fp8 there"
