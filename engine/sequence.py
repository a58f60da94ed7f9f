"""The mutable life of one request on one worker: its tokens, its blocks, how far it is computed."""

from __future__ import annotations

from core.errors import InternalError, TwostrokeError
from core.prefix import BlockHash, hash_block
from core.request import FinishReason, GenerateRequest, RequestKey
from engine.batch import SampleSpec, ScheduledSequence
from engine.block_pool import BlockPool


class Sequence:
    """KV of positions [0, num_computed_tokens) is in `block_ids`, the rest is not computed yet.

    While decoding exactly one known token is uncomputed: the newest.

    Stamps are seconds of the owner's clock, handed in by the scheduler's caller.
    """

    __slots__ = (
        "arrived",
        "block_hashes",
        "block_ids",
        "error",
        "finish_reason",
        "first_scheduled",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_hashed_blocks",
        "num_steps",
        "request",
        "root",
        "token_ids",
    )

    def __init__(self, request: GenerateRequest, root: BlockHash, *, now: float = 0.0) -> None:
        self.request = request
        self.root = root
        """Parent of the first block's hash: model, adapter and tenant."""
        self.token_ids = list(request.token_ids)
        self.block_ids: list[int] = []
        self.block_hashes: list[BlockHash] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        """Tokens whose KV was found, not computed (prefix cache or transfer)."""
        self.num_hashed_blocks = 0
        """Leading blocks already offered to the prefix cache."""
        self.finish_reason: FinishReason | None = None
        self.error: TwostrokeError | None = None
        """Set instead of a token when the model gave none; the sequence has ended."""
        self.arrived = now
        self.first_scheduled: float | None = None
        self.num_steps = 0

    @property
    def key(self) -> RequestKey:
        return self.request.key

    @property
    def num_output_tokens(self) -> int:
        """Over all attempts."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def hashes(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """Hashes of the first `num_blocks` blocks; all their tokens must be known."""
        while len(self.block_hashes) < num_blocks:
            start = len(self.block_hashes) * block_size
            parent = self.block_hashes[-1] if self.block_hashes else self.root
            tokens = self.token_ids[start : start + block_size]
            assert len(tokens) == block_size, f"block at {start} of {self.key} is not full"
            self.block_hashes.append(hash_block(parent, tokens))
        return self.block_hashes[:num_blocks]

    def cache_full_blocks(self, pool: BlockPool) -> None:
        """Offer every block that became full to the prefix cache."""
        num_full = self.num_computed_tokens // pool.block_size
        for index in range(self.num_hashed_blocks, num_full):
            block_hash = self.hashes(index + 1, pool.block_size)[index]
            pool.cache(self.block_ids[index], block_hash)
        self.num_hashed_blocks = max(self.num_hashed_blocks, num_full)

    def scheduled(self, num_tokens: int) -> ScheduledSequence:
        """The next `num_tokens` uncomputed tokens as a share of a step."""
        end = self.num_computed_tokens + num_tokens
        last = end == len(self.token_ids)
        return ScheduledSequence(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            token_ids=tuple(self.token_ids[self.num_computed_tokens : end]),
            num_computed_tokens=self.num_computed_tokens,
            block_ids=tuple(self.block_ids),
            sample=SampleSpec(
                sampling=self.request.sampling,
                choice_index=self.request.choice_index,
                position=len(self.token_ids),
            )
            if last
            else None,
        )

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def take(self, token_id: int | None, max_model_len: int) -> None:
        """Append a sampled token and decide whether it is the last."""
        if token_id is None:
            self.error = InternalError("the model's logits are not finite")
            return
        self.token_ids.append(token_id)
        self.finish_reason = self.request.stop_reason(token_id, self.num_output_tokens)
        if self.finish_reason is None and len(self.token_ids) >= max_model_len:
            self.finish_reason = FinishReason.LENGTH

    def release(self, pool: BlockPool) -> None:
        """Give all blocks back and forget what was computed: the same sequence can start again."""
        pool.free(self.block_ids)
        self.block_ids = []
        self.num_computed_tokens = 0
        self.num_hashed_blocks = 0
