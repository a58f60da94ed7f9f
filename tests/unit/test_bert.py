"""Encoders against transformers: hidden states of each pooling, and classification heads, with
sequences of mixed lengths in one step."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ModelLoadError
from engine.batch import Batch, Pooling, ScheduledSequence


@pytest.fixture
def texts(prompts):
    """Without the padding token, which transformers gives no position of its own."""
    return [[max(token_id, 2) for token_id in prompt] for prompt in prompts]


@pytest.fixture
def saved(request, make_encoder, tmp_path):
    model = make_encoder(request.param)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def pool(runner, inputs, pooling):
    """One step over all inputs, whose blocks lie one after another."""
    block_size = runner.kv_cache.layout.block_size
    sequences, next_block = [], 0
    for index, token_ids in enumerate(inputs):
        num_blocks = -(-len(token_ids) // block_size)
        block_ids = tuple(range(next_block, next_block + num_blocks))
        next_block += num_blocks
        sequences.append(
            ScheduledSequence(
                request_id=str(index),
                token_ids=tuple(token_ids),
                num_computed_tokens=0,
                block_ids=block_ids,
                pooling=pooling,
            )
        )
    results = runner.execute(Batch(sequences=tuple(sequences)))
    return torch.stack([result.pooled for result in results])


def expected(model, inputs, take):
    with torch.no_grad():
        hidden = [model(torch.tensor([item])).last_hidden_state[0] for item in inputs]
    return torch.stack([take(item) for item in hidden])


TAKE = {
    Pooling.MEAN: lambda hidden: hidden.sum(0),
    Pooling.CLS: lambda hidden: hidden[0],
    Pooling.LAST: lambda hidden: hidden[-1],
}


@pytest.mark.parametrize("saved", ["bert", "roberta", "xlm-roberta"], indirect=True)
@pytest.mark.parametrize("pooling", TAKE)
def test_hidden_states_equal_transformers(saved, pooling, make_runner, texts):
    model, folder = saved
    ours = pool(make_runner(str(folder)), texts, pooling)
    reference = expected(model, texts, TAKE[pooling])
    torch.testing.assert_close(ours, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("saved", ["bert-scores", "roberta-scores"], indirect=True)
def test_label_scores_equal_transformers(saved, make_runner, texts):
    model, folder = saved
    ours = pool(make_runner(str(folder)), texts, Pooling.CLASSIFY)
    with torch.no_grad():
        reference = torch.cat([model(torch.tensor([item])).logits for item in texts])
    torch.testing.assert_close(ours, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("saved", ["bert-scores"], indirect=True)
def test_second_text_of_a_pair_has_its_own_token_type(saved, make_runner):
    model, folder = saved
    first, second = [5, 8, 13, 2], [21, 34, 55, 2]
    token_types = torch.tensor([[0] * 4 + [1] * 4])
    with torch.no_grad():
        logits = model(torch.tensor([first + second]), token_type_ids=token_types).logits
    runner = make_runner(str(folder))
    ours = pool(runner, [first + [token_id + 101 for token_id in second]], Pooling.CLASSIFY)
    torch.testing.assert_close(ours, logits, atol=1e-4, rtol=1e-4)
    assert (pool(runner, [first + second], Pooling.CLASSIFY) - logits).abs().max() > 1e-3


@pytest.mark.parametrize("saved", ["bert"], indirect=True)
def test_pretrained_file_of_the_oldest_kind(saved, make_runner, texts):
    """Prefix, masked-language head, and norms with gamma and beta, as bert-base-uncased has."""
    model, folder = saved
    tensors = {
        "bert." + name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    assert any(name.endswith("gamma") for name in tensors)
    tensors["cls.predictions.bias"] = torch.zeros(101)
    tensors["embeddings.position_ids"] = torch.arange(128)
    save_file(tensors, folder / "model.safetensors")
    ours = pool(make_runner(str(folder)), texts, Pooling.CLS)
    reference = expected(model, texts, TAKE[Pooling.CLS])
    torch.testing.assert_close(ours, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("saved", ["roberta"], indirect=True)
def test_roberta_has_fewer_positions_than_rows(saved, make_runner):
    runner = make_runner(str(saved[1]))
    assert runner.max_model_len == 126
    token_ids = [index % 99 + 2 for index in range(126)]
    ours = pool(runner, [token_ids], Pooling.LAST)
    reference = expected(saved[0], [token_ids], TAKE[Pooling.LAST])
    torch.testing.assert_close(ours, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("saved", ["bert"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_decoder": True}, "is_decoder"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "mish"}, "'mish'"),
        ({"architectures": ["BertForSequenceClassification"]}, "classifier"),
    ],
)
def test_what_we_would_run_wrongly_is_refused(change, message, saved, make_runner, change_config):
    change_config(saved[1], change)
    with pytest.raises(ModelLoadError, match=message):
        make_runner(str(saved[1]))


@pytest.mark.parametrize("saved", ["bert"], indirect=True)
def test_an_encoders_sequence_comes_whole(saved, make_runner):
    sequence = ScheduledSequence(
        request_id="", token_ids=(5, 6), num_computed_tokens=3, block_ids=(0, 1)
    )
    with pytest.raises(AssertionError, match="one chunk"):
        make_runner(str(saved[1])).execute(Batch(sequences=(sequence,)))
