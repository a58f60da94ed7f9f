"""Sparse mixture of experts: a router sends each token to a few of many MLPs (arXiv:1701.06538).

Where a token goes (`route`, pure) and what an expert makes of it (`Experts`) are apart, so that
experts may live on other ranks than the router's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.errors import ModelLoadError
from core.model_config import ModelConfig
from engine.models.layers import GatedMLP
from parallel.groups import Group, Placement, SingleRank
from parallel.linear import parameter
from parallel.partition import expert_range
from parallel.weights import WeightSlot, copy_shard


class Routing(NamedTuple):
    """The experts of each token, [num_tokens, top_k] both."""

    expert_ids: Tensor
    weights: Tensor


def route(logits: Tensor, top_k: int, *, normalize: bool) -> Routing:
    """logits [num_tokens, num_experts] -> each token's likeliest experts, weighted by their
    probabilities; `normalize` makes a token's weights add up to 1. In float32."""
    weights, expert_ids = logits.softmax(dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(expert_ids, weights)


class Router(nn.Module):
    """[num_tokens, hidden_size] -> logits [num_tokens, num_experts]. Whole on every rank and never
    quantised: it is small, and a token sent to a wrong expert is a wrong token."""

    def __init__(self, hidden_size: int, num_experts: int, *, placement: Placement) -> None:
        super().__init__()
        self.weight = parameter(placement, num_experts, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot("weight", tuple(self.weight.shape), partial(copy_shard, self.weight))


class Experts(nn.ModuleDict):
    """MLPs that each see only the tokens routed to them; one that is not hit costs nothing."""

    def __init__(self, experts: Mapping[int, nn.Module], num_experts: int) -> None:
        """Those of this rank, by number, of `num_experts` on all."""
        super().__init__({str(number): expert for number, expert in experts.items()})
        self.num_experts = num_experts

    def forward(self, hidden: Tensor, routing: Routing) -> Tensor:
        """[num_tokens, hidden_size] -> the same: a token's weighted sum over its experts here."""
        out = torch.zeros_like(hidden)
        top_k = routing.expert_ids.shape[1]
        weights = routing.weights.to(hidden.dtype).view(-1, 1)
        dealt = pairs_by_expert(routing, self.num_experts)
        for number, expert in self.items():
            pairs = dealt[int(number)]
            if len(pairs):
                rows = pairs // top_k
                out.index_add_(0, rows, expert(hidden[rows]) * weights[pairs])
        return out


def pairs_by_expert(routing: Routing, num_experts: int) -> tuple[Tensor, ...]:
    """For each expert the numbers, token * top_k + k, of the (token, choice) pairs that name it."""
    chosen = routing.expert_ids.flatten()
    counts: list[int] = chosen.bincount(minlength=num_experts).tolist()
    return torch.split(chosen.argsort(stable=True), counts)


class SparseMoE(nn.Module):
    """[num_tokens, hidden_size] -> the same. Module names are those of Qwen's checkpoints."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_experts: int,
        top_k: int,
        intermediate_size: int,
        normalize: bool,
        placement: Placement,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ModelLoadError(f"{top_k} of {num_experts} experts per token are not possible")
        self.top_k = top_k
        self.normalize = normalize
        self.gate = Router(config.hidden_size, num_experts, placement=placement)
        self.group: Group = SingleRank()
        """Over which the experts' sums are added up."""
        numbers = range(num_experts)
        if placement.expert_parallel:
            # Every rank has all tokens anyway, as attention leaves them: nothing is dispatched, and
            # one all-reduce takes the place of the one that split experts need.
            self.group = placement.group
            numbers = expert_range(num_experts, self.group.rank, self.group.size)
            placement = replace(placement, group=SingleRank())
        self.experts = Experts(
            {
                number: GatedMLP(config, intermediate_size=intermediate_size, placement=placement)
                for number in numbers
            },
            num_experts,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        routing = route(self.gate(hidden), self.top_k, normalize=self.normalize)
        return self.group.all_reduce(self.experts(hidden, routing))
