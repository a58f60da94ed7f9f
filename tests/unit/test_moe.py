"""Routing and experts against the sums they stand for. Whole models: test_models.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from core.errors import ModelLoadError
from engine.models.moe import Experts, Routing, pairs_by_expert, route


class Scale(nn.Module):
    """An expert that counts the rows it is given."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.calls = []

    def forward(self, hidden):
        self.calls.append(len(hidden))
        return hidden * self.factor


def random_logits(num_tokens, num_experts, seed):
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))


@given(
    num_tokens=st.integers(1, 9),
    num_experts=st.integers(1, 8),
    data=st.data(),
    normalize=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_route_takes_the_likeliest_experts(num_tokens, num_experts, data, normalize):
    top_k = data.draw(st.integers(1, num_experts))
    logits = random_logits(num_tokens, num_experts, data.draw(st.integers(0, 99)))
    routing = route(logits, top_k, normalize=normalize)
    for row, expert_ids, weights in zip(logits, *routing, strict=True):
        likeliest = row.argsort(descending=True)[:top_k]
        assert expert_ids.tolist() == likeliest.tolist()
        chosen = row.exp()[likeliest]
        expected = chosen / (chosen.sum() if normalize else row.exp().sum())
        torch.testing.assert_close(weights, expected)


@given(num_tokens=st.integers(1, 9), num_experts=st.integers(1, 8), data=st.data())
@settings(max_examples=60, deadline=None)
def test_pairs_are_dealt_to_the_experts_they_name(num_tokens, num_experts, data):
    top_k = data.draw(st.integers(1, num_experts))
    logits = random_logits(num_tokens, num_experts, data.draw(st.integers(0, 99)))
    routing = route(logits, top_k, normalize=True)
    dealt = pairs_by_expert(routing, num_experts)
    named = routing.expert_ids.flatten().tolist()
    assert sorted(torch.cat(dealt).tolist()) == list(range(num_tokens * top_k))
    assert all(named[pair] == expert for expert, pairs in enumerate(dealt) for pair in pairs)


def test_output_is_the_weighted_sum_and_idle_experts_do_not_run():
    factors = (1.0, 10.0, 100.0, 1000.0)
    experts = Experts({i: Scale(factor) for i, factor in enumerate(factors)}, len(factors))
    routing = Routing(
        expert_ids=torch.tensor([[0, 2], [2, 0], [2, 1]]),
        weights=torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 2.0]]),
    )
    out = experts(torch.tensor([[1.0], [2.0], [3.0]]), routing)
    assert out.flatten().tolist() == [50.5, 51.5, 360.0]
    assert [expert.calls for expert in experts.values()] == [[2], [1], [3], []]


def test_routing_of_a_token_does_not_depend_on_its_neighbours():
    logits = random_logits(6, 8, seed=1)
    together = route(logits, 3, normalize=True)
    for index, row in enumerate(logits):
        alone = route(row.unsqueeze(0), 3, normalize=True)
        assert torch.equal(alone.expert_ids[0], together.expert_ids[index])
        assert torch.equal(alone.weights[0], together.weights[index])


def test_published_checkpoints_name_the_count_otherwise(
    make_hf_model, make_runner, drive, prompts, assert_equals_hf, change_config, tmp_path
):
    """num_experts on the hub, num_local_experts from transformers 5."""
    model = make_hf_model("qwen3-moe")
    model.save_pretrained(tmp_path)
    change_config(tmp_path, {"num_local_experts": None, "num_experts": 7})
    assert_equals_hf(drive(make_runner(str(tmp_path)), prompts, num_tokens=4), model)


def test_layers_listed_as_plain_have_no_experts(
    make_hf_model, make_runner, drive, prompts, assert_equals_hf, tmp_path
):
    model = make_hf_model("qwen3-moe", mlp_only_layers=[1])
    model.save_pretrained(tmp_path)
    assert_equals_hf(drive(make_runner(str(tmp_path)), prompts, num_tokens=4), model)


def test_more_experts_per_token_than_there_are_is_refused(
    make_hf_model, make_runner, change_config, tmp_path
):
    make_hf_model("mixtral").save_pretrained(tmp_path)
    change_config(tmp_path, {"num_experts_per_tok": 6})
    with pytest.raises(ModelLoadError, match="6 of 5 experts per token"):
        make_runner(str(tmp_path))
