"""The colocated engine: both schedulers over one pool and one executor, no network.

It is the baseline that disaggregation is measured against and the oracle its tokens must equal.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from core.config import EngineConfig
from core.errors import ContextLengthError, TwostrokeError
from core.prefix import hash_root
from core.request import FinishReason, GenerateRequest, TokenChunk
from core.worker import Progress
from engine.batch import Batch
from engine.block_pool import BlockPool
from engine.executor import Executor, LocalExecutor, longest_sequence
from engine.model_runner import ModelRunner
from engine.scheduler import DecodeScheduler, PrefillScheduler
from engine.sequence import Sequence as EngineSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """New tokens of one request in one step."""

    request_id: str
    chunk: TokenChunk
    error: TwostrokeError | None = None
    """Set: the request failed alone, without a token in this step."""


class LLMEngine:
    """`add_request`, then `step` until `has_unfinished_requests` is false."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self._executor = executor
        self.pool = BlockPool.for_cache(executor.num_blocks, config.cache)
        self.max_model_len = longest_sequence(executor)
        self._prefill = PrefillScheduler(config.scheduler, self.pool, self.max_model_len)
        self._decode = DecodeScheduler(config.scheduler, self.pool, self.max_model_len)

    @classmethod
    def from_config(cls, config: EngineConfig, progress: Progress | None = None) -> LLMEngine:
        return cls(config, LocalExecutor(ModelRunner(config, progress=progress)))

    def step(self) -> list[StepOutput]:
        """One forward pass over every decoding sequence and as many prompt chunks as fit."""
        decode = self._decode.schedule()
        for sequence in reversed(decode.preempted):
            self._prefill.add(sequence, first=True)
        prefill = self._prefill.schedule(
            time.monotonic(),
            num_reserved_tokens=len(decode.shares),
            num_reserved_blocks=len(decode.shares),
        )
        if not decode.shares and not prefill:
            return []
        token_ids = self._executor.execute(Batch(sequences=(*decode.shares, *prefill)))
        split = len(decode.shares)
        stepped = self._decode.update(decode.shares, token_ids[:split])
        for sequence in self._prefill.update(prefill, token_ids[split:]):
            self._hand_on(sequence)
            stepped.append(sequence)
        return [_output(sequence) for sequence in stepped]

    def _hand_on(self, sequence: EngineSequence) -> None:
        if sequence.ended:
            sequence.release(self.pool)
        else:
            self._decode.add(sequence)

    def add_request(self, request: GenerateRequest) -> None:
        """Raises InvalidRequestError, ContextLengthError when the prompt leaves no room."""
        request.check(self._executor.model_config.vocab_size)
        if len(request.token_ids) >= self.max_model_len:
            raise ContextLengthError(
                f"{len(request.token_ids)} tokens do not fit into a context of {self.max_model_len}"
            )
        root = hash_root(model=self._executor.layout.model, salt=request.cache_salt)
        self._prefill.add(EngineSequence(request, root, now=time.monotonic()))

    def abort(self, request_id: str, attempt: int = 0) -> bool:
        """Forget the request and free its blocks; False when it is not here."""
        return any(
            scheduler.abort(request_id, attempt) is not None
            for scheduler in (self._prefill, self._decode)
        )

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._decode.running) or not self._prefill.idle

    def generate(self, requests: Sequence[GenerateRequest]) -> list[TokenChunk]:
        """Run all requests to their end; one chunk each, in the order of `requests`. Raises the
        first error any of them ends with."""
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        reasons: dict[str, FinishReason | None] = {}
        for request in requests:
            self.add_request(request)
        while self.has_unfinished_requests:
            for output in self.step():
                if output.error is not None:
                    raise output.error
                tokens[output.request_id] += output.chunk.token_ids
                reasons[output.request_id] = output.chunk.finish_reason
        return [
            TokenChunk(token_ids=tuple(tokens[r.request_id]), finish_reason=reasons[r.request_id])
            for r in requests
        ]


def _output(sequence: EngineSequence) -> StepOutput:
    token_ids = () if sequence.error else (sequence.token_ids[-1],)
    chunk = TokenChunk(token_ids=token_ids, finish_reason=sequence.finish_reason)
    return StepOutput(request_id=sequence.request.request_id, chunk=chunk, error=sequence.error)
