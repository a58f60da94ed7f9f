"""Embeddings and scores from the colocated engine, in one call each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from core.config import EngineConfig
from core.errors import InvalidRequestError
from core.worker import Progress
from engine.batch import Pooling
from engine.llm_engine import LLMEngine
from engine.pooling import PoolingConfig, PoolingRequest, load_pooling_config

TokenIds = Sequence[int]


class Embedder:
    """Drives `engine` while a call lasts; whatever else runs on it goes on, unheard."""

    def __init__(self, engine: LLMEngine, config: PoolingConfig) -> None:
        self._engine = engine
        self._config = config

    @classmethod
    def from_config(cls, config: EngineConfig, progress: Progress | None = None) -> Embedder:
        """Raises as ModelRunner and load_pooling_config."""
        engine = LLMEngine.from_config(config, progress)
        return cls(engine, load_pooling_config(config.model_path, engine.model_config))

    def embed(
        self,
        inputs: Sequence[TokenIds],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
    ) -> Tensor:
        """[len(inputs), hidden_size] float32; the model's own pooling where none is named."""
        if pooling is not None and not isinstance(pooling, Pooling):
            raise InvalidRequestError(
                f"pooling must be one of {', '.join(f'Pooling.{p.name}' for p in Pooling)}",
                param="pooling",
            )
        vectors = self._pool([(item, ()) for item in inputs], pooling or self._config.pooling)
        wanted = self._config.normalize if normalize is None else normalize
        return F.normalize(vectors, dim=-1) if wanted else vectors

    def classify(self, pairs: Sequence[tuple[TokenIds, TokenIds]]) -> Tensor:
        """[len(pairs), num_labels] float32: the logits of a classification head. A pair is one
        sequence, cut where its second text begins, with all special tokens (the second part is
        empty for a single text)."""
        return self._pool(pairs, Pooling.CLASSIFY)

    def score(self, pairs: Sequence[tuple[TokenIds, TokenIds]]) -> Tensor:
        """[len(pairs)] float32, higher for texts that fit each other better. A cross-encoder's
        logit (pairs as for `classify`), else the cosine of the two texts' vectors."""
        num_labels = self._engine.model_config.num_labels
        if num_labels > 1:
            raise InvalidRequestError(
                f"a score needs a model with one label, this one has {num_labels}", param="model"
            )
        if num_labels:
            return self.classify(pairs)[:, 0]
        vectors = self.embed(list(chain.from_iterable(pairs)), normalize=True)
        return (vectors[0::2] * vectors[1::2]).sum(dim=-1)

    def _pool(self, pairs: Sequence[tuple[TokenIds, TokenIds]], pooling: Pooling) -> Tensor:
        """One row per pair. Raises the first error there is, and leaves nothing in the engine."""
        if not pairs:
            raise InvalidRequestError("the input is empty", param="input")
        requests = [
            PoolingRequest(
                request_id=f"embedder-{index}",
                token_ids=tuple(first),
                second_token_ids=tuple(second),
                pooling=pooling,
            )
            for index, (first, second) in enumerate(pairs)
        ]
        return torch.stack(self._engine.pool_all(requests))
