"""Which part of a model a rank holds. Pure arithmetic: weights and KV transfer both ask here, so
the two can never disagree.

Every `*_range` takes (whole, rank, size) and returns the range of indices of that rank.
"""

from __future__ import annotations

from core.config import ParallelConfig
from core.errors import ConfigError
from core.model_config import ModelConfig


def _check_rank(rank: int, size: int) -> None:
    assert 0 <= rank < size, f"rank {rank} of {size}"


def layer_range(num_layers: int, rank: int, size: int) -> range:
    """Layers of one pipeline stage. Uneven counts are fine: earlier stages hold one more, because
    the last one also runs the LM head. Raises ConfigError when a stage would be empty."""
    _check_rank(rank, size)
    if size > num_layers:
        raise ConfigError(f"{num_layers} layers cannot be split into {size} pipeline stages")
    quotient, remainder = divmod(num_layers, size)
    start = rank * quotient + min(rank, remainder)
    return range(start, start + quotient + (rank < remainder))


def even_range(total: int, rank: int, size: int, what: str = "elements") -> range:
    """Equal shares. Raises ConfigError naming `what` when `total` cannot be split evenly."""
    _check_rank(rank, size)
    if total % size:
        raise ConfigError(f"{total} {what} cannot be split over {size} tensor-parallel ranks")
    share = total // size
    return range(rank * share, (rank + 1) * share)


def head_range(num_heads: int, rank: int, size: int) -> range:
    """Query heads of a rank."""
    return even_range(num_heads, rank, size, "attention heads")


def kv_head_range(num_kv_heads: int, rank: int, size: int) -> range:
    """Key and value heads of a rank. With more ranks than heads several ranks hold a copy of one
    head: the one that their query heads attend to."""
    if size <= num_kv_heads:
        return even_range(num_kv_heads, rank, size, "kv heads")
    _check_rank(rank, size)
    if size % num_kv_heads:
        raise ConfigError(
            f"{num_kv_heads} kv heads cannot be replicated over {size} tensor-parallel ranks"
        )
    head = rank * num_kv_heads // size
    return range(head, head + 1)


def expert_range(num_experts: int, rank: int, size: int) -> range:
    """Experts that a rank holds whole: as equal numbers as can be. Raises ConfigError when a rank
    would have none."""
    _check_rank(rank, size)
    if size > num_experts:
        raise ConfigError(f"{num_experts} experts cannot be spread over {size} ranks")
    return range(num_experts * rank // size, num_experts * (rank + 1) // size)


def vocab_range(vocab_size: int, rank: int, size: int) -> range:
    """Vocabulary rows of a rank. All ranks but the last few hold `vocab_shard_size` rows."""
    _check_rank(rank, size)
    share = vocab_shard_size(vocab_size, size)
    return range(min(rank * share, vocab_size), min((rank + 1) * share, vocab_size))


def vocab_shard_size(vocab_size: int, size: int) -> int:
    """Rows that each rank stores: equal on all ranks (zero-padded), so that shards can be gathered
    into one tensor."""
    return -(-vocab_size // size)


def check_shape(model: ModelConfig, shape: ParallelConfig) -> None:
    """Raises ConfigError when `model` cannot be split so, with the reason."""
    layer_range(model.num_layers, 0, shape.pipeline_parallel_size)
    size = shape.tensor_parallel_size
    head_range(model.num_attention_heads, 0, size)
    kv_head_range(model.num_kv_heads, 0, size)
    even_range(model.intermediate_size, 0, size, "features between a layer's matrices")
