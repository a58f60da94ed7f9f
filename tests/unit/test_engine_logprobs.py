"""Log probabilities of prompt and output as the engine gives them, against transformers'."""

import pytest
import torch

from engine.executor import LocalExecutor
from engine.llm_engine import LLMEngine


@pytest.fixture(scope="module")
def model(make_hf_model, tmp_path_factory):
    model = make_hf_model("llama3", seed=4)
    folder = tmp_path_factory.mktemp("logprobs")
    model.save_pretrained(folder)
    return model, str(folder)


@torch.no_grad()
def reference(model, tokens):
    """[len(tokens) - 1, vocab]: what each position says of the next token."""
    return model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def assert_equal(found, expected, tokens, num_top):
    """`found` are the entries of `tokens`, `expected` the rows they were chosen from."""
    assert [entry.token_id for entry in found] == list(tokens)
    for entry, row in zip(found, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        best = row.topk(num_top)
        assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("num_blocks", [9, 64])  # with preemptions, and without
def test_prompt_and_output_log_probabilities_equal_transformers(
    model, make_runner, make_request, engine_config, num_blocks
):
    """Whatever the chunks, and though the prompt's blocks are in the cache: what is wanted of
    every position must be computed. They come once, with the first choice."""
    hf, folder = model
    config = engine_config(num_blocks=num_blocks, max_num_batched_tokens=7)
    engine = LLMEngine(config, LocalExecutor(make_runner(folder, num_blocks=num_blocks)))
    prompt = list(range(3, 20))
    engine.generate([make_request(prompt, max_tokens=2)])  # warms the cache
    requests = [
        make_request(
            prompt, request_id=f"{i}", max_tokens=12, num_choices=2, logprobs=3, prompt_logprobs=2
        )
        for i in range(2)
    ]
    chunks = engine.generate(requests)
    assert (engine.kv_usage.num_preemptions > 0) == (num_blocks == 9)
    for index, chunk in enumerate(chunks):
        rows = reference(hf, [*prompt, *chunk.token_ids])
        assert_equal(chunk.logprobs, rows[len(prompt) - 1 :], chunk.token_ids, 3)
        if index % 2:
            assert chunk.prompt_logprobs == ()
        else:
            assert_equal(chunk.prompt_logprobs, rows[: len(prompt) - 1], prompt[1:], 2)


def test_a_prompt_of_one_token_has_none(model, make_runner, make_request, engine_config):
    engine = LLMEngine(engine_config(), LocalExecutor(make_runner(model[1], num_blocks=64)))
    [chunk] = engine.generate([make_request([5], max_tokens=1, prompt_logprobs=2)])
    assert chunk.prompt_logprobs == ()
