"""A whole stage in one call against the same weights operator by operator and against torch: equal
numbers, equal bits however a prompt is cut, batched or shared out, and only where the kernels know
the model's shape."""

import shutil
from dataclasses import dataclass

import pytest
import torch

from core.config import CacheConfig, EngineConfig
from core.sampling_params import SamplingParams
from engine.batch import Batch, SampleSpec, ScheduledSequence
from engine.fused_stage import fused_stage, stage_inputs
from engine.llm_engine import LLMEngine
from parallel.groups import PipelineStage, Rank, SingleRank

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

BLOCK_SIZE = 16
ONE_RANK = Rank(group=SingleRank())
SHAPE = {"hidden_size": 96, "head_dim": 16}
"""Six heads of a whole vector each; the vocabulary of 101 fills no panel."""
ODD = {"hidden_size": 54, "head_dim": 32, "num_key_value_heads": 1}
FUSED = {
    "llama2": SHAPE,
    "llama3": SHAPE | ODD,
    "llama-linear": SHAPE,
    "llama-yarn": SHAPE,
    "llama-bias": SHAPE,
    "smollm2": SHAPE | ODD,
    "mistral": SHAPE,
    "mistral-full": SHAPE,
    "qwen2": SHAPE,
    "qwen2-window": SHAPE,
    "qwen3": SHAPE | ODD,
    "qwen3-bias": SHAPE,
    "smollm3": SHAPE,
    "smollm3-window": SHAPE,
}
NOT_FUSED = ("gemma2", "gemma3", "phi3", "olmo2", "granite", "mixtral", "qwen2-moe", "qwen3-moe")
LENGTHS = (1, 4, 17, 40, 150)


def sequence(tokens, block_ids, *, computed=0, samples=True):
    spec = SampleSpec(
        sampling=SamplingParams(temperature=0.0), choice_index=0, position=computed + len(tokens)
    )
    return ScheduledSequence(
        request_id="a",
        token_ids=tuple(tokens),
        num_computed_tokens=computed,
        block_ids=tuple(block_ids),
        samples=(spec,) if samples else (),
    )


def tokens_of(length, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(101, (length,), generator=generator).tolist()


def blocks_from(first, length):
    """Block ids for `length` positions, in no order."""
    return [first + block for block in reversed(range(-(-length // BLOCK_SIZE)))]


def two_steps():
    """Prompts of all LENGTHS at once, then one more token for each and a new prompt."""
    prompts, tokens, first = [], [], 0
    for length in LENGTHS:
        block_ids = blocks_from(first, length + 1)
        prompts.append(sequence(tokens_of(length), block_ids))
        tokens.append(sequence([length % 101], block_ids, computed=length))
        first += len(block_ids)
    tokens.append(sequence(tokens_of(9), blocks_from(first, 9)))
    return Batch(sequences=tuple(prompts)), Batch(sequences=tuple(tokens))


def logits_of(runner):
    return torch.cat([runner.logits(batch) for batch in two_steps()])


def difference(got, expected):
    return float((got - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def folder_of(make_hf_model, tmp_path_factory):
    folders = {}

    def folder(family, changes=None):
        changes = FUSED[family] if changes is None else changes
        key = family, repr(changes)
        if key not in folders:
            folders[key] = str(tmp_path_factory.mktemp(family))
            make_hf_model(family, **changes).save_pretrained(folders[key])
        return folders[key]

    return folder


@pytest.fixture(scope="module")
def load(folder_of, make_runner):
    def load(family, kernels="native", **config):
        config = {"block_size": BLOCK_SIZE, "num_blocks": 32, **config}
        return make_runner(folder_of(family), kernels=kernels, **config)

    return load


@pytest.fixture
def generate(make_request, run_to_the_end):
    """Greedy tokens by (request, choice)."""

    def generate(folder, kernels):
        cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=32)
        config = EngineConfig(model_path=folder, kernels=kernels, cache=cache, num_threads=2)
        engine = LLMEngine.from_config(config)
        for length in LENGTHS:
            request = make_request(
                tokens_of(length), request_id=str(length), max_tokens=24, temperature=0.0
            )
            engine.add_request(request)
        return run_to_the_end(engine, {})

    return generate


@pytest.fixture(autouse=True)
def threads():
    """A runner sets torch's; the number before comes back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# -- the same numbers


@pytest.mark.parametrize("family", FUSED)
def test_stage_equals_operators_and_torch(family, load):
    native = load(family)
    assert native._stage is not None
    expected = logits_of(load(family, "torch"))
    assert difference(logits_of(native), expected) < 1e-5
    native._stage = None
    assert difference(logits_of(native), expected) < 1e-5


@pytest.mark.parametrize(("kv_dtype", "near"), [("float32", 1e-5), ("int8", 1e-2)])
@pytest.mark.parametrize("family", ["llama3", "qwen3-bias", "smollm3-window"])
def test_every_level(family, kv_dtype, near, kernel_library, load):
    expected = logits_of(load(family, "torch", kv_dtype=kv_dtype))
    native = load(family, kv_dtype=kv_dtype)
    whole = Rank(group=SingleRank())
    native._stage = fused_stage(native._model, native.model_config, whole, kernel_library)
    assert difference(logits_of(native), expected) < near


@pytest.mark.parametrize("family", FUSED)
def test_stage_equals_operators_and_torch_over_int8_kv(family, load):
    """Up to numbers that lie between two codes and fall to either side, and what the layers above
    make of them: a part of what int8 itself loses."""
    native, exact = load(family, kv_dtype="int8"), logits_of(load(family, "torch"))
    assert native._stage is not None
    assert native.kv_cache.tensor.dtype == torch.int8
    fused = logits_of(native)
    native._stage = None
    expected = logits_of(load(family, "torch", kv_dtype="int8"))
    loss = difference(expected, exact)
    assert 1e-2 < loss < 0.1
    assert difference(fused, logits_of(native)) < loss / 8
    assert difference(fused, expected) < loss / 8


@pytest.mark.parametrize(
    ("config", "near_operators", "near_torch"),
    [
        ({"dtype": "bfloat16"}, 0.05, 0.05),
        ({"quantization": "int8"}, 0.02, 0.15),
        ({"quantization": "int4"}, 0.02, 0.15),
        ({"quantization": "int8", "dtype": "bfloat16"}, 0.15, 0.15),
    ],
)
@pytest.mark.parametrize("family", ["llama2", "qwen3-bias"])
def test_rounded_formats(family, config, near_operators, near_torch, load):
    """Products of quantised weights round activations to 8 bits, torch's do not; in bfloat16 a
    stage rounds less often than operators. These tiny models make much of it."""
    native = load(family, **config)
    assert native._stage is not None
    fused = logits_of(native)
    native._stage = None
    assert difference(fused, logits_of(native)) < near_operators
    assert difference(fused, logits_of(load(family, "torch", **config))) < near_torch


def test_gates_far_below_zero(kernel_library, load):
    """exp(-gate) is beyond float32 there, and the gate shut."""
    runners = [load("llama2", "torch"), load("llama2")]
    for runner in runners:
        for layer in runner._model.model.layers.values():
            layer.post_attention_layernorm.weight *= 100
    native = runners[1]
    whole = Rank(group=SingleRank())
    native._stage = fused_stage(native._model, native.model_config, whole, kernel_library)
    expected, got = map(logits_of, runners)
    assert difference(got, expected) < 1e-4


@pytest.mark.parametrize("family", ["llama3", "qwen2-window"])
def test_engine_writes_the_same_tokens(family, folder_of, generate):
    native, torch_ = (generate(folder_of(family), kernels) for kernels in ("native", "torch"))
    assert native == torch_
    assert len({token for tokens in native.values() for token in tokens}) > 10


# -- the same bits


@dataclass
class Steps:
    """Runs steps on a runner and keeps what its stage said last."""

    runner: object
    num_threads: int = 1

    def run(self, *sequences):
        inputs = stage_inputs(Batch(sequences=sequences), block_size=BLOCK_SIZE)
        cache = self.runner.kv_cache.tensor
        return self.runner._stage.run(inputs, cache, num_threads=self.num_threads)


FORMATS = [{}, {"dtype": "bfloat16"}, {"quantization": "int4"}, {"kv_dtype": "int8"}]


@pytest.fixture(params=FORMATS, ids=str)
def steps(request, load):
    return Steps(load("mistral", **request.param))


PROMPT = tokens_of(200)
BLOCKS = blocks_from(0, 200)


def alone(steps):
    """Of the prompt's last token, read in one step."""
    return steps.run(sequence(PROMPT, BLOCKS)).logits[0]


@pytest.mark.parametrize("sizes", [[199, 1], [1, 199], [7, 64, 100, 29], [64, 64, 72], [1] * 200])
def test_chunks_do_not_matter(steps, sizes):
    expected, computed = alone(steps), 0
    for size in sizes:
        tokens = PROMPT[computed : computed + size]
        outputs = steps.run(sequence(tokens, BLOCKS, computed=computed))
        computed += size
    assert torch.equal(outputs.logits[0], expected)


@pytest.mark.parametrize("count", [1, 2, 6, 13])
def test_neighbours_do_not_matter(steps, count):
    expected = alone(steps)
    others = [
        sequence(tokens_of(1 + 5 * i % 16, seed=7), [13 + i], samples=i % 2 == 0)
        for i in range(count)
    ]
    logits = steps.run(*others, sequence(PROMPT, BLOCKS)).logits
    assert torch.equal(logits[-1], expected)
    logits = steps.run(sequence(PROMPT[-1:], BLOCKS, computed=199), *others).logits
    assert torch.equal(logits[0], expected)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_and_cut_attention_do_not_matter(steps, num_threads):
    """With two threads and few sequences, long ones' attention is cut among them."""
    expected = alone(steps)
    steps.num_threads = num_threads
    assert torch.equal(alone(steps), expected)
    again = steps.run(sequence(PROMPT[-1:], BLOCKS, computed=199))
    assert torch.equal(again.logits[0], expected)


# -- the likeliest token


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_likeliest_is_torchs_argmax(load, num_threads):
    steps = Steps(load("llama2"), num_threads)
    batch, _ = two_steps()
    outputs = steps.run(*batch.sequences)
    assert outputs.likeliest.tolist() == outputs.logits.argmax(-1).tolist()
    assert len(set(outputs.likeliest.tolist())) > 1


HEADS = {
    "all equal": lambda head: head.zero_(),
    "pairs": lambda head: head[51:].copy_(head[:50]),
    "one NaN": lambda head: head[40].fill_(torch.nan),
    "NaNs": lambda head: head[[70, 40, 99]].fill_(torch.nan),
    "all NaN": lambda head: head.fill_(torch.nan),
    "infinite": lambda head: head[[20, 90], 3].fill_(torch.inf),
    "infinite and NaN": lambda head: (head[[5, 90], 3].fill_(torch.inf), head[60].fill_(torch.nan)),
    "nothing": lambda head: head[:, 3].fill_(-torch.inf),
}


@pytest.fixture
def load_with_head(make_hf_model, make_runner, tmp_path):
    def load(change):
        model = make_hf_model("llama2", **SHAPE)
        with torch.no_grad():
            change(model.lm_head.weight)
        model.save_pretrained(tmp_path)
        return make_runner(str(tmp_path), kernels="native", block_size=BLOCK_SIZE, num_blocks=32)

    return load


@pytest.mark.parametrize("name", HEADS)
def test_the_likeliest_of_ties_and_of_what_is_no_number(name, load_with_head):
    steps = Steps(load_with_head(HEADS[name]))
    for steps.num_threads in (1, 2, 3):
        for tokens in (tokens_of(7), tokens_of(9)):
            logits, likeliest = steps.run(sequence(tokens, [0]))[1:3]
            expected = logits.argmax(-1).where(logits.amax(-1).isfinite(), -1)
            assert likeliest.tolist() == expected.tolist()


@pytest.mark.parametrize(("kv_dtype", "no_number"), [("float32", torch.nan), ("int8", -1)])
def test_a_spoiled_sequence_spoils_no_other(kv_dtype, no_number, load):
    """NaN in one sequence's KV (int8: as scales, whose bits are all 1): the other's bits stay."""
    steps = Steps(load("llama2", kv_dtype=kv_dtype))
    first = sequence(PROMPT[:40], blocks_from(0, 41))
    other = sequence(tokens_of(30), blocks_from(10, 31))
    expected = steps.run(other).logits[0]
    steps.run(first, other)
    steps.runner.kv_cache.tensor[:, :, 0] = no_number
    more = sequence([3], blocks_from(0, 41), computed=40)
    outputs = steps.run(more, other)
    assert outputs.logits[0].isnan().all()
    assert torch.equal(outputs.logits[1], expected)
    assert outputs.finite.tolist() == [False, True]


# -- which models


@pytest.mark.parametrize("family", NOT_FUSED)
def test_other_families_run_operator_by_operator(family, folder_of, make_runner):
    runners = [
        make_runner(folder_of(family, {}), kernels=kernels, block_size=BLOCK_SIZE, num_blocks=32)
        for kernels in ("native", "torch")
    ]
    assert runners[0]._stage is None
    got, expected = map(logits_of, runners)
    assert difference(got, expected) < 1e-5


def test_encoders_run_operator_by_operator(make_encoder, make_runner, tmp_path):
    make_encoder("bert").save_pretrained(tmp_path)
    assert make_runner(str(tmp_path), kernels="native", block_size=BLOCK_SIZE)._stage is None


class OneOfTwo(SingleRank):
    size = 2


def test_no_stage_over_ranks_in_small_blocks_or_with_other_kv(load):
    runner = load("llama2")
    model, config, library = runner._model, runner.model_config, runner._library
    stage = PipelineStage(index=0, count=2)
    for rank in (Rank(group=OneOfTwo()), Rank(group=SingleRank(), stage=stage)):
        assert fused_stage(model, config, rank, library) is None
    assert load("llama2", block_size=8, num_blocks=64)._stage is None
    assert load("llama2", kernels="torch")._stage is None
    assert load("llama2", kv_dtype="fp8")._stage is None
