"""Embeddings and scores through the engine against transformers, and how a model says what it
wants."""

import json

import pytest
import torch
import torch.nn.functional as F

from core.config import CacheConfig, EngineConfig, SchedulerConfig
from core.errors import ContextLengthError, InternalError, InvalidRequestError, ModelLoadError
from core.model_files import load_model_config
from core.request import GenerateRequest
from core.sampling_params import SamplingParams
from engine.batch import Pooling
from engine.embedder import Embedder
from engine.llm_engine import LLMEngine
from engine.models.interface import model_class
from engine.pooling import PoolingConfig, PoolingRequest, load_pooling_config

MEAN = PoolingConfig(pooling=Pooling.MEAN, normalize=True)
TAKE = {
    Pooling.MEAN: lambda hidden: hidden.mean(0),
    Pooling.CLS: lambda hidden: hidden[0],
    Pooling.LAST: lambda hidden: hidden[-1],
}


@pytest.fixture
def save(make_encoder, make_hf_model, tmp_path):
    """(HF model, folder) of an encoder or a decoder."""

    def make(name):
        model = make_encoder(name) if name.startswith(("bert", "roberta")) else make_hf_model(name)
        model.save_pretrained(tmp_path)
        return model, tmp_path

    return make


def engine_config(folder, *, max_num_batched_tokens=16, num_blocks=64):
    """A budget below the longest prompts: decoders read them in chunks."""
    return EngineConfig(
        model_path=str(folder),
        cache=CacheConfig(block_size=4, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=4),
    )


def hidden_states(model, inputs):
    with torch.no_grad():
        return [model.base_model(torch.tensor([item])).last_hidden_state[0] for item in inputs]


def equal(ours, reference):
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "bert"])
@pytest.mark.parametrize("pooling", TAKE)
def test_embeddings_equal_transformers(name, pooling, save, prompts):
    model, folder = save(name)
    engine = LLMEngine.from_config(engine_config(folder))
    embedder = Embedder(engine, MEAN)
    reference = torch.stack([TAKE[pooling](item) for item in hidden_states(model, prompts)])
    for _ in range(2):  # the second time a decoder's blocks are in the prefix cache
        ours = embedder.embed(prompts, pooling=pooling, normalize=False)
        equal(ours, reference)
    assert engine.kv_usage.num_used_blocks == 0
    equal(embedder.embed(prompts, pooling=pooling), F.normalize(reference, dim=-1))


def test_decoder_reads_cached_blocks_only_for_the_last_token(save, prompts):
    _, folder = save("llama3")
    engine = LLMEngine.from_config(engine_config(folder))
    steps = {}
    for pooling in (Pooling.LAST, Pooling.LAST, Pooling.MEAN):
        request = PoolingRequest(request_id="r", token_ids=tuple(prompts[-1]), pooling=pooling)
        engine.add_pooling_request(request)
        steps[pooling] = 0
        while engine.has_unfinished_requests:
            engine.step()
            steps[pooling] += 1
    assert steps == {Pooling.LAST: 1, Pooling.MEAN: 4}  # 61 tokens, 16 a step


def test_embedding_among_generation_changes_no_token(save, prompts):
    _, folder = save("llama3")
    requests = [
        GenerateRequest(
            request_id=f"g{index}",
            model="",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=8),
        )
        for index, prompt in enumerate(prompts[:3])
    ]
    alone = LLMEngine.from_config(engine_config(folder)).generate(requests)
    engine = LLMEngine.from_config(engine_config(folder))
    for index, prompt in enumerate(prompts):
        pooling = PoolingRequest(
            request_id=f"p{index}", token_ids=tuple(prompt), pooling=Pooling.MEAN
        )
        engine.add_pooling_request(pooling)
        if index < 3:
            engine.add_request(requests[index])
    tokens, vectors = {}, {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.pooled is None:
                tokens[output.request_id] = (
                    tokens.get(output.request_id, ()) + output.chunk.token_ids
                )
            else:
                assert not output.chunk.token_ids
                vectors[output.request_id] = output.pooled
    assert [tokens[f"g{index}"] for index in range(3)] == [chunk.token_ids for chunk in alone]
    together = torch.stack([vectors[f"p{index}"] for index in range(len(prompts))])
    equal(together, Embedder(engine, MEAN).embed(prompts, normalize=False))


def test_cross_encoder_scores_equal_transformers(save):
    model, folder = save("bert-scores")
    pairs = [([5, 8, 13, 2], [21, 34, 2]), ([7, 2], [9] * 30 + [2]), ([5, 8, 2], [])]
    with torch.no_grad():
        expected = [
            model(
                torch.tensor([first + second]),
                token_type_ids=torch.tensor([[0] * len(first) + [1] * len(second)]),
            ).logits[0, 0]
            for first, second in pairs
        ]
    embedder = Embedder.from_config(engine_config(folder))
    equal(embedder.score(pairs), torch.stack(expected))


def test_cross_encoder_without_token_types(save):
    model, folder = save("roberta-scores")
    pairs = [([5, 8, 13, 2], [2, 21, 34, 2]), ([7, 2], [2, 9, 2])]
    with torch.no_grad():
        expected = [model(torch.tensor([first + second])).logits[0] for first, second in pairs]
    embedder = Embedder.from_config(engine_config(folder))
    equal(embedder.classify(pairs), torch.stack(expected))
    with pytest.raises(InvalidRequestError, match="one label, this one has 3"):
        embedder.score(pairs)


def test_scores_of_an_embedding_model_are_cosines(save, prompts):
    model, folder = save("bert")
    pairs = [(prompts[1], prompts[2]), (prompts[3], prompts[3]), (prompts[5], prompts[0])]
    firsts, seconds = (
        torch.stack([hidden.mean(0) for hidden in hidden_states(model, side)])
        for side in zip(*pairs, strict=True)
    )
    ours = Embedder.from_config(engine_config(folder)).score(pairs)
    equal(ours, F.cosine_similarity(firsts, seconds))
    assert ours[1] == pytest.approx(1.0)


def test_encoder_refuses_to_generate(save):
    engine = LLMEngine.from_config(engine_config(save("bert")[1]))
    request = GenerateRequest(
        request_id="r", model="", prompt_token_ids=(5,), sampling=SamplingParams()
    )
    with pytest.raises(InvalidRequestError, match="bert is an encoder"):
        engine.add_request(request)
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"token_ids": ()}, InvalidRequestError, "empty"),
        ({"token_ids": (5, 101)}, InvalidRequestError, "token id 101 is outside"),
        ({"token_ids": (-1, 5)}, InvalidRequestError, "token id -1 is outside"),
        ({"second_token_ids": (101,)}, InvalidRequestError, "token id 101 is outside"),
        ({"token_ids": (5,) * 129}, ContextLengthError, "129 tokens do not fit into .* 128"),
        ({"pooling": Pooling.CLASSIFY}, InvalidRequestError, "no classification head"),
    ],
)
def test_bad_input_is_refused(changes, error, message, save):
    engine = LLMEngine.from_config(engine_config(save("bert")[1]))
    plain = {"request_id": "r", "token_ids": (5,), "pooling": Pooling.CLS}
    with pytest.raises(error, match=message):
        engine.add_pooling_request(PoolingRequest(**{**plain, **changes}))
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize("bad", [[[5], [101]], [[5], []], []])
def test_call_that_fails_leaves_nothing_behind(bad, save, prompts):
    engine = LLMEngine.from_config(engine_config(save("bert")[1]))
    embedder = Embedder(engine, MEAN)
    before = embedder.embed(prompts)
    with pytest.raises(InvalidRequestError):
        embedder.embed(bad)
    assert not engine.has_unfinished_requests
    equal(embedder.embed(prompts), before)


def test_vectors_that_are_not_finite_are_refused(save):
    model, folder = save("bert")
    with torch.no_grad():
        model.encoder.layer[1].output.LayerNorm.weight[3] = float("nan")
    model.save_pretrained(folder)
    with pytest.raises(InternalError, match="not finite"):
        Embedder.from_config(engine_config(folder)).embed([[5, 6]])


def test_a_request_that_bears_an_embedders_id_is_left_alone(make_hf_model, tmp_path):
    """The call is refused, and what was here before goes on."""
    make_hf_model("llama3").save_pretrained(tmp_path)
    engine = LLMEngine.from_config(engine_config(str(tmp_path)))
    sampling = SamplingParams(temperature=0.0, max_tokens=3)
    request = GenerateRequest(
        request_id="embedder-0", model="", prompt_token_ids=(5, 6), sampling=sampling
    )
    engine.add_request(request)
    with pytest.raises(InvalidRequestError, match="already here"):
        Embedder(engine, MEAN).embed([[7, 8]])
    tokens = []
    while engine.has_unfinished_requests:
        tokens += [token for output in engine.step() for token in output.chunk.token_ids]
    assert len(tokens) == 3


def test_a_pooling_by_name_is_refused_with_what_there_is(save):
    embedder = Embedder.from_config(engine_config(save("bert")[1]))
    with pytest.raises(InvalidRequestError, match=r"Pooling\.MEAN"):
        embedder.embed([[5, 6]], pooling="mean")


def test_longest_encoder_sequence_is_read_whole(save):
    model, folder = save("bert")
    token_ids = [index % 99 for index in range(128)]
    ours = Embedder(LLMEngine.from_config(engine_config(folder)), MEAN).embed([token_ids, [5]])
    reference = [hidden.mean(0) for hidden in hidden_states(model, [token_ids, [5]])]
    equal(ours, F.normalize(torch.stack(reference), dim=-1))


TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
OLD = {"word_embedding_dimension": 48, "pooling_mode_max_tokens": False, "include_prompt": True}


@pytest.fixture
def load(save):
    """The pooling config of a model with these files beside it."""

    def load(name, modules=None, pooling=None):
        _, folder = save(name)
        if modules is not None:
            (folder / "modules.json").write_text(json.dumps(modules))
        if pooling is not None:
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        config = load_model_config(str(folder))
        return load_pooling_config(str(folder), model_class(config).configure(config))

    return load


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({**OLD, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({**OLD, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({**OLD, "pooling_mode_lasttoken": True}, "last"),
        ({"embedding_dimension": 48, "pooling_mode": "mean"}, "mean"),
        ({"embedding_dimension": 48, "pooling_mode": "lasttoken"}, "last"),
    ],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_pooling_is_what_sentence_transformers_wrote(settings, pooling, normalize, load):
    modules = [TRANSFORMER, POOLING, *([NORMALIZE] if normalize else [])]
    found = load("bert", modules, settings)
    assert found == PoolingConfig(pooling=Pooling(pooling), normalize=normalize)


@pytest.mark.parametrize(("name", "pooling"), [("bert", Pooling.MEAN), ("qwen3", Pooling.LAST)])
def test_pooling_of_a_model_that_says_nothing(name, pooling, load):
    assert load(name) == PoolingConfig(pooling=pooling, normalize=True)


@pytest.mark.parametrize(
    ("modules", "settings", "message"),
    [
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode": "mean"}, "Dense is not supported"),
        ([TRANSFORMER], None, "no Pooling"),
        ([TRANSFORMER, POOLING], None, "not readable JSON"),
        ([TRANSFORMER, POOLING], {**OLD, "pooling_mode_max_tokens": True}, "'max_tokens'"),
        ([TRANSFORMER, POOLING], {"pooling_mode": ["mean", "cls"]}, "pooling_mode"),
        (
            [TRANSFORMER, POOLING],
            {**OLD, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "'cls_token and mean_tokens'",
        ),
        ([TRANSFORMER, POOLING], OLD, "''"),
        ([1], None, "not a JSON object"),
    ],
)
def test_pooling_that_we_would_get_wrong_is_refused(modules, settings, message, load):
    with pytest.raises(ModelLoadError, match=message):
        load("bert", modules, settings)
