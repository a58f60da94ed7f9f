"""The mutable life of one answer on one worker: its tokens, its blocks, how far it is computed."""

from __future__ import annotations

from copy import copy

from torch import Tensor

from core.errors import InternalError, InvalidRequestError, TwostrokeError
from core.prefix import BlockHash, hash_block
from core.request import FinishReason, GenerateRequest, RequestKey, TokenLogprobs
from core.sampling_params import SamplingParams
from engine.batch import Pooling, Sampled, SampleSpec, ScheduledSequence, SequenceResult
from engine.block_pool import BlockPool

LIKELIEST = SamplingParams(temperature=0.0)


class Sequence:
    """KV of positions [0, num_computed_tokens) is in `block_ids`, the rest is not computed yet.

    While decoding exactly one known token is uncomputed: the newest. A sequence that was asked for
    several choices has none of its own yet; `fork` makes the others when the prompt is read.

    Stamps are seconds of the owner's clock, handed in by the scheduler's caller.
    """

    __slots__ = (
        "arrived",
        "block_hashes",
        "block_ids",
        "candidates",
        "choice_index",
        "error",
        "finish_reason",
        "first_scheduled",
        "needs_whole",
        "newest_logprobs",
        "num_cached_tokens",
        "num_candidates",
        "num_choices",
        "num_computed_tokens",
        "num_hashed_blocks",
        "num_steps",
        "pooled",
        "pooling",
        "prompt_logprobs",
        "request",
        "root",
        "spoiled_block_ids",
        "token_ids",
        "wants_prompt_logprobs",
    )

    def __init__(
        self,
        request: GenerateRequest,
        root: BlockHash,
        *,
        now: float = 0.0,
        pooling: Pooling | None = None,
        needs_whole: bool = False,
    ) -> None:
        self.request = request
        self.root = root
        """Parent of the first block's hash: model, adapter and tenant."""
        self.choice_index = request.choice_index
        self.num_choices = request.num_choices
        """Choices to draw when all known tokens are computed."""
        self.num_candidates = 0
        """Of a beam: so many likeliest next tokens are wanted, and none is appended."""
        self.candidates: tuple[tuple[int, float], ...] = ()
        """(token id, log probability), once they are known."""
        self.pooling = pooling
        """Set: a vector is wanted and no token."""
        self.needs_whole = needs_whole
        """An encoder's: computed in one step, and no part of it is of use to another."""
        self.token_ids = list(request.token_ids)
        self.block_ids: list[int] = []
        self.block_hashes: list[BlockHash] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        """Tokens whose KV was found, not computed (prefix cache or transfer)."""
        self.num_hashed_blocks = 0
        """Leading blocks already offered to the prefix cache."""
        self.newest_logprobs: TokenLogprobs | None = None
        self.wants_prompt_logprobs = (
            request.sampling.prompt_logprobs is not None and not request.output_token_ids
        )
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.pooled: Tensor | None = None
        self.finish_reason: FinishReason | None = None
        self.error: TwostrokeError | None = None
        """Set instead of a token when there was none to choose; the sequence has ended."""
        self.spoiled_block_ids: list[int] = []
        """Blocks given back that hold what is no number: masked positions have weight 0, and
        0 * NaN is NaN, so the executor must clear them before anyone else gets them."""
        self.arrived = now
        self.first_scheduled: float | None = None
        self.num_steps = 0

    @property
    def key(self) -> RequestKey:
        """Shared by all choices of a request."""
        return self.request.key

    @property
    def sequence_key(self) -> tuple[str, int, int]:
        return self.request.request_id, self.request.attempt, self.choice_index

    @property
    def order(self) -> tuple[int, float]:
        """Smaller goes first and is preempted last."""
        return self.request.priority, self.arrived

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """Over all attempts."""
        return tuple(self.token_ids[len(self.request.prompt_token_ids) :])

    @property
    def num_output_tokens(self) -> int:
        """Over all attempts."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def newest_token_ids(self) -> tuple[int, ...]:
        """What the last step gave: one token, or none where it failed or a vector was wanted."""
        return () if self.error or self.pooling else (self.token_ids[-1],)

    @property
    def newest_token_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of newest_token_ids, where the request wants them."""
        return () if self.error or self.newest_logprobs is None else (self.newest_logprobs,)

    @property
    def may_read_cache(self) -> bool:
        """Not where something is wanted of every position: a cached one is not computed."""
        pools_others = self.pooling not in (None, Pooling.LAST)
        return not (self.wants_prompt_logprobs or pools_others or self.needs_whole)

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
        if self.needs_whole:
            return
        num_full = self.num_computed_tokens // pool.block_size
        for index in range(self.num_hashed_blocks, num_full):
            block_hash = self.hashes(index + 1, pool.block_size)[index]
            pool.cache(self.block_ids[index], block_hash)
        self.num_hashed_blocks = max(self.num_hashed_blocks, num_full)

    def scheduled(self, num_tokens: int) -> ScheduledSequence:
        """The next `num_tokens` uncomputed tokens as a share of a step."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + num_tokens
        prompt = self.request.prompt_token_ids
        next_ids = prompt[start + 1 : end + 1] if self.wants_prompt_logprobs else ()
        return ScheduledSequence(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            choice_index=self.choice_index,
            token_ids=tuple(self.token_ids[start:end]),
            num_computed_tokens=start,
            block_ids=tuple(self.block_ids),
            samples=self._samples() if end == len(self.token_ids) else (),
            num_prompt_logprobs=self.request.sampling.prompt_logprobs if next_ids else None,
            next_token_ids=next_ids,
            pooling=self.pooling if self.pooling and self._pools(start, end) else None,
        )

    def _pools(self, start: int, end: int) -> bool:
        """Whether the tokens [start, end) have what is pooled."""
        match self.pooling:
            case Pooling.LAST:
                return end == len(self.token_ids)
            case Pooling.CLS | Pooling.CLASSIFY:
                return start == 0
        return self.pooling is Pooling.MEAN

    def _samples(self) -> tuple[SampleSpec, ...]:
        if self.pooling is not None:
            return ()
        first = self.choice_index
        return tuple([self._sample_spec(first + index) for index in range(self.num_choices)])

    def _sample_spec(self, choice_index: int) -> SampleSpec:
        if self.num_candidates:
            return SampleSpec(
                sampling=LIKELIEST,
                choice_index=choice_index,
                position=len(self.token_ids),
                num_logprobs=self.num_candidates,
            )
        request, sampling = self.request, self.request.sampling
        reads = sampling.reads_tokens
        return SampleSpec(
            sampling=sampling,
            choice_index=choice_index,
            position=len(self.token_ids),
            num_logprobs=sampling.logprobs,
            prompt_token_ids=request.prompt_token_ids if reads else (),
            output_token_ids=self.output_token_ids if reads else (),
            barred_token_ids=request.ending_token_ids
            if self.num_output_tokens < sampling.min_tokens
            else (),
        )

    @property
    def ended(self) -> bool:
        read = self.pooling is not None and not self.num_uncomputed_tokens
        return read or self.finish_reason is not None or self.error is not None

    def computed(self, num_tokens: int, result: SequenceResult, pool: BlockPool) -> None:
        """A step has computed the next `num_tokens`; says nothing of what was sampled."""
        self.num_computed_tokens += num_tokens
        self.num_steps += 1
        if not result.is_finite:
            self._fail(InternalError("the model's hidden states are not finite"))
            return
        self.cache_full_blocks(pool)
        self.prompt_logprobs += result.prompt_logprobs
        if result.pooled is not None:
            self.pooled = result.pooled if self.pooled is None else self.pooled + result.pooled

    def take(self, sampled: Sampled, max_model_len: int) -> None:
        """Append a sampled token and decide whether it is the last."""
        self.wants_prompt_logprobs = False
        if sampled.token_id is None:
            self._fail(_no_token(sampled))
            return
        if self.num_candidates:
            assert sampled.logprobs is not None, "a beam asks for log probabilities"
            self.candidates = sampled.logprobs.top
            return
        self.token_ids.append(sampled.token_id)
        self.newest_logprobs = sampled.logprobs
        self.finish_reason = self.request.stop_reason(sampled.token_id, self.num_output_tokens)
        if self.finish_reason is None and len(self.token_ids) >= max_model_len:
            self.finish_reason = FinishReason.LENGTH

    def _fail(self, error: TwostrokeError) -> None:
        self.error = error
        self.prompt_logprobs = []

    def fork(self, choice_index: int, pool: BlockPool) -> Sequence:
        """Another answer that goes on from the same tokens and shares all blocks; whoever writes
        to a shared one first gets a copy (DecodeScheduler)."""
        other = copy(self)
        other.choice_index = choice_index
        other.num_choices = 1
        other.token_ids = self.token_ids.copy()
        other.block_ids = self.block_ids.copy()
        other.block_hashes = self.block_hashes.copy()
        other.prompt_logprobs = []
        other.spoiled_block_ids = []
        other.wants_prompt_logprobs = False
        pool.share(other.block_ids)
        return other

    def release(self, pool: BlockPool) -> None:
        """Give all blocks back and forget what was computed: the same sequence can start again."""
        if isinstance(self.error, InternalError):
            self.spoiled_block_ids += pool.discard(self.block_ids)
        else:
            pool.free(self.block_ids)
        self.block_ids = []
        self.num_computed_tokens = 0
        self.num_hashed_blocks = 0
        self.prompt_logprobs = []
        self.pooled = None


def _no_token(sampled: Sampled) -> TwostrokeError:
    if sampled.all_barred:
        return InvalidRequestError(
            "the sampling parameters bar every token of the vocabulary at this position"
        )
    return InternalError("the model's logits are not finite")
