"""A model over several ranks equals transformers on one: tensor parallelism over real gloo
collectives, pipeline stages over real gloo messages, and both.

The ranks are threads: each owns its groups and there is no global state to share, so processes
would prove nothing more.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from shutil import which

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from core.config import ParallelConfig
from core.errors import ConfigError, RankLostError
from core.model_files import load_model_config
from core.sampling_params import SamplingParams
from engine.batch import Batch, Pooling, SampleSpec, ScheduledSequence
from engine.models.moe import SparseMoE
from parallel.collectives import gloo_group
from parallel.groups import PipelineStage, Rank, SingleRank
from parallel.pipeline import PipelineLink

TIMEOUT_S = 30.0
HIDDEN_SIZE = 48


def join_rank(store, tp, pp, number, **hidden):
    stage = PipelineStage(index=number // tp, count=pp)
    place = number % tp
    group, link = SingleRank(), None
    if tp > 1:
        group = gloo_group(PrefixStore(f"stage {stage.index}", store), place, tp, TIMEOUT_S)
    if pp > 1:
        link = join_link(PrefixStore(f"place {place}", store), stage.index, pp, **hidden)
    return Rank(group=group, stage=stage, link=link)


def join_link(
    store, stage, count, *, hidden_size=HIDDEN_SIZE, dtype=torch.float32, timeout_s=TIMEOUT_S
):
    return PipelineLink.join(
        store,
        stage,
        count,
        hidden_size=hidden_size,
        dtype=dtype,
        host="127.0.0.1",
        timeout_s=timeout_s,
    )


def at_once(function, *arguments):
    """As map, each call in a thread of its own."""
    with ThreadPoolExecutor(len(arguments[0])) as pool:
        return list(pool.map(function, *arguments))


@dataclass
class Ranks:
    """Takes the place of a runner; all runners run each step at once."""

    runners: list
    tp: int

    @property
    def kv_cache(self):
        return self.runners[0].kv_cache

    @property
    def last_stage(self):
        return self.runners[-self.tp :]

    def logits(self, batch):
        def run(runner):
            return runner.logits(batch) if runner in self.last_stage else runner.execute(batch)

        *earlier, logits = self._split(at_once(run, self.runners))
        assert all(results == () for results in earlier)
        assert all(torch.equal(other, logits[0]) for other in logits)
        return logits[0]

    def execute(self, batch):
        """What the first rank of the last stage says; the others must say nothing."""
        *earlier, (results, *others) = self._split(
            at_once(lambda runner: runner.execute(batch), self.runners)
        )
        assert all(other == () for other in (*earlier, *others))
        return results

    def _split(self, results):
        return *results[: -self.tp], results[-self.tp :]


@pytest.fixture
def make_ranks(make_runner):
    """(path, tp, pp, ep) -> Ranks. A world rank is stage * tp + place in the stage's group."""

    def make(path, tp=1, pp=1, ep=False, **config):
        store = HashStore()
        shape = ParallelConfig(
            tensor_parallel_size=tp, pipeline_parallel_size=pp, expert_parallel=ep
        )
        hidden = {
            "hidden_size": load_model_config(str(path)).hidden_size,
            "dtype": getattr(torch, config.get("dtype", "float32")),
        }

        def load(number):
            rank = join_rank(store, tp, pp, number, **hidden)
            return make_runner(str(path), rank=rank, parallel=shape, **config)

        return Ranks(at_once(load, range(tp * pp)), tp)

    return make


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("llama2", 2, 1),
        ("llama2", 3, 1),
        ("mixtral", 2, 1),
        ("qwen2-moe", 2, 1),
        ("qwen3-moe", 2, 1),
        ("llama3", 6, 1),  # 2 kv heads: each is held by three ranks
        ("llama-bias", 2, 1),
        ("qwen2", 2, 1),
        ("qwen3-bias", 2, 1),
        ("smollm3", 2, 1),
        ("gemma2", 2, 1),
        ("gemma3", 6, 1),
        ("granite-bias", 2, 1),
        ("olmo2", 2, 1),
        ("olmo2", 6, 1),  # the norm of k spans ranks that hold copies
        ("phi3", 2, 1),  # the parts of q, k and v are split after the file's one tensor
        ("llama3", 1, 2),
        ("smollm2", 1, 3),  # the head on the last stage shares the first one's embedding
        ("qwen2-window", 1, 2),  # only the second stage has windows
        ("qwen2-moe-mixed", 1, 3),
        ("qwen3-moe-mixed", 1, 3),
        ("smollm3", 1, 2),  # rotates nothing on the second stage's first layer
        ("smollm3", 1, 5),
        ("gemma2", 1, 3),  # windows on the first and the third
        ("gemma3", 1, 3),  # three, two and two layers; the sixth one rotates otherwise
        ("granite", 1, 2),
        ("olmo2", 1, 3),
        ("phi4-mini", 1, 2),
        ("llama2", 2, 2),
        ("smollm2", 3, 2),
        ("qwen2-moe", 2, 2),
        ("gemma3", 2, 2),
        ("olmo2", 2, 2),
        ("phi3-window", 2, 3),
    ],
)
def test_ranks_together_equal_transformers(
    name, tp, pp, make_ranks, make_hf_model, drive, prompts, assert_equals_hf, tmp_path
):
    model = make_hf_model(name)
    model.save_pretrained(tmp_path)
    ranks = make_ranks(tmp_path, tp, pp)
    assert_equals_hf(drive(ranks, prompts, num_tokens=4), model)
    for runner in ranks.runners:
        heads = runner.kv_cache.layout.num_kv_heads
        assert heads == max(1, model.config.num_key_value_heads // tp)


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("mixtral", 2, 1),
        ("mixtral", 2, 2),
        ("qwen2-moe", 2, 1),  # beside the experts one for all tokens, split as ever
        ("qwen2-moe-mixed", 1, 3),
        ("qwen3-moe", 2, 1),
        ("qwen3-moe-mixed", 2, 3),
    ],
)
def test_whole_experts_equal_transformers(
    name, tp, pp, make_ranks, make_hf_model, drive, prompts, assert_equals_hf, tmp_path
):
    model = make_hf_model(name)
    model.save_pretrained(tmp_path)
    ranks = make_ranks(tmp_path, tp, pp, ep=True)
    assert_equals_hf(drive(ranks, prompts, num_tokens=4), model)
    for layer in {key for runner in ranks.runners for key in runner._model.model.layers}:
        moes = [
            runner._model.model.layers[layer].mlp
            for runner in ranks.runners
            if layer in runner._model.model.layers
        ]
        held = [number for moe in moes if isinstance(moe, SparseMoE) for number in moe.experts]
        assert held == sorted(set(held), key=int), "each on one rank"


def test_a_model_without_experts_has_none_to_spread(make_ranks, make_hf_model, tmp_path):
    make_hf_model("llama2").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no experts"):
        make_ranks(tmp_path, 2, ep=True)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 3), (2, 2)])
def test_gpt2_in_stages(tp, pp, make_ranks, gpt2_model, drive, prompts, assert_equals_hf, tmp_path):
    gpt2_model.save_pretrained(tmp_path)
    ranks = make_ranks(tmp_path, tp, pp)
    assert_equals_hf(drive(ranks, prompts, num_tokens=6), gpt2_model)
    holders = [hasattr(runner._model, "embed_positions") for runner in ranks.runners]
    assert holders == [True] * tp + [False] * tp * (pp - 1)


@pytest.mark.parametrize(
    "config",
    [
        {"kernels": "torch"},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "int4", "dtype": "bfloat16"},
    ],
)
def test_stages_compute_the_bits_of_one_rank(
    config, make_ranks, make_runner, make_hf_model, drive, prompts, tmp_path
):
    make_hf_model("qwen3", hidden_size=64, num_attention_heads=8).save_pretrained(tmp_path)
    whole, staged = (
        drive(runner, prompts, num_tokens=4)
        for runner in (make_runner(str(tmp_path), **config), make_ranks(tmp_path, 1, 2, **config))
    )
    for alone, together in zip(whole, staged, strict=True):
        assert torch.equal(torch.stack(alone.logits), torch.stack(together.logits))


def test_stages_run_operator_by_operator_on_the_kernels(
    make_ranks, make_runner, make_hf_model, drive, prompts, assert_equals_hf, tmp_path
):
    """Where one rank would run all layers in one call."""
    model = make_hf_model("llama2", hidden_size=96)
    model.save_pretrained(tmp_path)
    ranks = make_ranks(tmp_path, 1, 2, block_size=16)
    assert (make_runner(str(tmp_path), block_size=16)._stage is None) == (which("g++") is None)
    assert all(runner._stage is None for runner in ranks.runners)
    assert_equals_hf(drive(ranks, prompts, num_tokens=6), model)


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_holds_its_part_alone(tied, make_ranks, make_runner, make_hf_model, tmp_path):
    make_hf_model("llama2", num_hidden_layers=4, tie_word_embeddings=tied).save_pretrained(tmp_path)
    whole = make_runner(str(tmp_path), kernels="torch")
    stages = make_ranks(tmp_path, 1, 3, kernels="torch").runners
    layouts = [runner.kv_cache.layout for runner in stages]
    assert [(one.first_layer, one.num_layers) for one in layouts] == [(0, 2), (2, 1), (3, 1)]
    assert [len(runner.kv_cache.tensor) for runner in stages] == [2, 1, 1]
    assert {one.model for one in layouts} == {whole.kv_cache.layout.model}
    vocabulary = 101 * HIDDEN_SIZE * 4
    held = [runner.weight_bytes for runner in stages]
    assert sum(held) == whole.weight_bytes + tied * vocabulary
    assert held[0] - vocabulary == 2 * held[1]
    assert held[2] - vocabulary == held[1] + HIDDEN_SIZE * 4, "its norm"


def chunk(name, token_ids, first_block, *, computed=0, length, **wanted):
    """The next tokens of a prompt of `length`, its blocks one after another; the last one is
    followed by a token."""
    num_blocks = -(-length // 4)
    end = computed + len(token_ids)
    spec = SampleSpec(sampling=SamplingParams(temperature=0.0), choice_index=0, position=end)
    return ScheduledSequence(
        request_id=name,
        token_ids=tuple(token_ids),
        num_computed_tokens=computed,
        block_ids=tuple(range(first_block, first_block + num_blocks)),
        samples=(spec,) if end == length else (),
        **wanted,
    )


def two_steps():
    """Prompts in two chunks, of which something else is wanted each, beside a plain one."""
    prompt = [(7 * index) % 101 for index in range(75)]
    parts = (range(40), range(40, 75))  # more rows than the logits of a prompt are made of at once
    for step, part in enumerate(parts):
        next_ids = tuple(prompt[part.start + 1 : part.stop + 1])
        share = {"token_ids": prompt[part.start : part.stop], "computed": part.start, "length": 75}
        yield Batch(
            sequences=(
                chunk("a", first_block=0, num_prompt_logprobs=3, next_token_ids=next_ids, **share),
                chunk("b", first_block=20, pooling=Pooling.MEAN, **share),
                chunk("c", [8 + step, 9, 10], 40 + step, length=3),
                chunk("d", first_block=60, pooling=Pooling.LAST, **share),
            )
        )


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (2, 2), (3, 2)])
def test_results_through_ranks_equal_those_of_one(
    tp, pp, make_ranks, make_runner, make_hf_model, tmp_path
):
    make_hf_model("llama2").save_pretrained(tmp_path)
    whole, ranks = make_runner(str(tmp_path)), make_ranks(tmp_path, tp, pp)
    for batch in two_steps():
        for expected, got in zip(whole.execute(batch), ranks.execute(batch), strict=True):
            assert got.sampled == expected.sampled
            assert got.is_finite
            assert len(got.prompt_logprobs) == len(expected.prompt_logprobs)
            for ours, theirs in zip(got.prompt_logprobs, expected.prompt_logprobs, strict=True):
                assert ours.token_id == theirs.token_id
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
                assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
            assert (got.pooled is None) == (expected.pooled is None)
            if got.pooled is not None:
                torch.testing.assert_close(got.pooled, expected.pooled, atol=1e-4, rtol=1e-4)


def test_what_is_no_number_in_one_stage_is_known_in_the_last(make_ranks, make_hf_model, tmp_path):
    make_hf_model("llama2").save_pretrained(tmp_path)
    ranks = make_ranks(tmp_path, 1, 3, kernels="torch")
    ranks.runners[0]._model.model.embed_tokens.weight.values[9] = float("nan")
    batch = Batch(
        sequences=(chunk("a", [9, 5], 0, length=2), chunk("b", [5, 6], 1, length=2)),
    )
    assert [result.is_finite for result in ranks.execute(batch)] == [False, True]


def test_heads_that_cannot_be_split_are_refused(make_ranks, make_hf_model, tmp_path):
    make_hf_model("llama3").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="6 attention heads cannot be split over 4"):
        make_ranks(tmp_path, 4)


def test_more_stages_than_layers_are_refused(make_ranks, make_hf_model, tmp_path):
    make_hf_model("llama3").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="3 layers cannot be split into 4 pipeline stages"):
        make_ranks(tmp_path, 1, 4)


def test_an_encoder_in_stages_is_refused(make_ranks, make_encoder, tmp_path):
    make_encoder("bert").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"bert models do not run in pipeline stages.*is 2"):
        make_ranks(tmp_path, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives(dtype):
    store = HashStore()

    def work(rank):
        group = gloo_group(store, rank, 3, TIMEOUT_S)
        mine = torch.full((2, 3), float(group.rank + 1), dtype=dtype)
        return group, group.all_gather(mine), group.all_reduce(mine.clone().t())

    for _, gathered, total in at_once(work, range(3)):
        assert gathered.shape == (3, 2, 3)
        assert gathered[:, 0, 0].tolist() == [1.0, 2.0, 3.0]
        assert total.shape == (3, 2)
        assert total.unique().tolist() == [6.0]


@pytest.fixture
def make_links():
    def make(count, **config):
        store = HashStore()
        return at_once(lambda stage: join_link(store, stage, count, **config), range(count))

    return make


def states(count, value, dtype=torch.float32):
    return torch.full((count, HIDDEN_SIZE), float(value), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stage_sends_ahead_of_the_next_one(make_links, dtype):
    """A step per stage, before anyone has asked; they come in their order."""
    first, second, _ = make_links(3, dtype=dtype)
    sent = [states(step + 1, step, dtype) for step in range(3)]
    for hidden in sent:
        first.send(hidden.t().contiguous().t())
    assert all(torch.equal(second.receive(len(hidden)), hidden) for hidden in sent)


def test_what_is_not_read_yet_is_bounded(make_links):
    first, second = make_links(2)
    with ThreadPoolExecutor(1) as pool:
        pending = [pool.submit(first.send, states(1, step)) for step in range(4)]
        assert [second.receive(1)[0, 0].item() for _ in range(4)] == [0.0, 1.0, 2.0, 3.0]
        for send in pending:
            send.result()
    assert len(first._unread) == 2


def test_a_stage_that_is_gone_ends_its_neighbours(make_links):
    first, second, third = make_links(3)
    first.send(states(1, 0))
    del second
    with pytest.raises(RankLostError, match="stage 1 is gone"):
        third.receive(1)
    with pytest.raises(RankLostError, match="stage 1 is gone"):
        first.send(states(1, 1))


def test_a_silent_stage_is_given_up(make_links):
    links = make_links(2, timeout_s=0.2)
    with pytest.raises(RankLostError, match="stage 0 is gone, or silent"):
        links[1].receive(1)


def test_stages_that_do_not_come_are_given_up():
    with pytest.raises(RankLostError, match="2 pipeline stages did not meet"):
        join_link(HashStore(), 0, 2, timeout_s=0.1)
