"""What the runner and the loader need of a model, and how one is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import ClassVar, Protocol, cast

from torch import Tensor, nn

from core.model_config import ModelConfig
from engine.kernels import AttentionPlan
from engine.models.registry import MODELS, check_architecture
from parallel.groups import Placement
from parallel.weights import StoredTensor


class Model(Protocol):
    CHECKPOINT_NAMES: ClassVar[Mapping[str, str]]
    """Part of a slot's path -> what a checkpoint has in its place."""

    def __init__(self, config: ModelConfig, *, placement: Placement) -> None:
        """The part of the placement's stage. Parameters are allocated and not yet filled. Raises
        ModelLoadError for a setting the family does not have, ConfigError when the model cannot be
        split so."""
        ...

    @classmethod
    def configure(cls, config: ModelConfig) -> ModelConfig:
        """`config` as the family means it: what core/model_files.py cannot know."""
        ...

    def adapt(self, checkpoint: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
        """`checkpoint` as CHECKPOINT_NAMES expects it: a family whose files name or cut their
        tensors otherwise renames and splits them here (engine/models/stored.py)."""
        ...

    def ignores(self, name: str) -> bool:
        """Tensors some checkpoints hold and nobody needs."""
        ...

    def state_dict(self) -> Mapping[str, Tensor]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        plan: AttentionPlan,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """token_ids and positions [T], kv_cache as KVCache.tensor -> [T, hidden_size], not normed
        yet: only the rows that are wanted need it. `hidden`, of the same shape, is what the stage
        before has made; None: this is the first one."""
        ...

    def normalize(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> the same, as the LM head and embeddings want it. On the last
        stage only, as compute_logits."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size], not normed -> [num_rows, vocab_size] float32."""
        ...


def model_class(config: ModelConfig) -> type[Model]:
    """Raises ModelLoadError for an architecture that is not in the registry."""
    check_architecture(config.architecture)
    module, name = MODELS[config.architecture].split(":")
    return cast(type[Model], getattr(import_module(f"engine.models.{module}"), name))
