"""The prefill front end: submit, step, abort, report. Runs on one thread; knows no network.

A sequence is here from submit to its first token. Then its blocks are leased under a KVHandle and
outlive it until the decode side has them, says it will not, or stays silent past the lease.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from core.config import EngineConfig
from core.errors import (
    ContextLengthError,
    InvalidRequestError,
    RankLostError,
    StepFailedError,
    TwostrokeError,
)
from core.kv import KVHandle
from core.lifetime import PrefillTimes
from core.prefix import hash_root
from core.request import GenerateRequest, SequenceOutput
from core.worker import WorkerReport
from engine.batch import Batch, ScheduledSequence
from engine.block_pool import BlockPool
from engine.executor import Executor, clear_spoiled, longest_sequence
from engine.pooling import check_can_generate
from engine.reporter import Reporter
from engine.scheduler import PrefillScheduler
from engine.sequence import Sequence
from kv_transfer.sender import KVSender
from protocol.worker_server import StepResult

logger = logging.getLogger(__name__)


class PrefillWorker:
    """Raises InvalidRequestError at construction for an encoder."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        pool: BlockPool,
        sender: KVSender,
        clock: Callable[[], float],
    ) -> None:
        check_can_generate(executor.model_config)
        self._executor = executor
        self._pool = pool
        self._sender = sender
        self._clock = clock
        self.max_model_len = longest_sequence(executor)
        self._scheduler = PrefillScheduler(config.scheduler, pool, self.max_model_len)
        self._reporter = Reporter(pool)

    def step(self) -> StepResult:
        now = self._clock()
        self._end_leases(now)
        shares = self._scheduler.schedule(now)
        if not shares:
            return StepResult([], worked=False)
        try:
            results = self._executor.execute(Batch(sequences=tuple(shares)))
        except RankLostError:
            raise  # the end of this worker
        except Exception as error:
            logger.exception("a prefill step failed")
            return StepResult(self._fail(shares, error), worked=True)
        done = self._scheduler.update(shares, results)
        outputs = [self._hand_over(sequence) for sequence in done]
        clear_spoiled(self._executor, done)
        return StepResult(outputs, worked=True)

    def submit(self, request: GenerateRequest, handle: KVHandle | None) -> None:
        """Raises ContextLengthError or InvalidRequestError; the request is then not here."""
        if handle is not None:
            raise InvalidRequestError("a prefill worker takes no KV handle", param="handle")
        request.check(self._executor.model_config.vocab_size)
        if len(request.token_ids) >= self.max_model_len:
            raise ContextLengthError(
                f"{len(request.token_ids)} tokens leave no room in a context of "
                f"{self.max_model_len}"
            )
        root = hash_root(model=self._executor.layout.model, salt=request.cache_salt)
        self._scheduler.add(Sequence(request, root, now=self._clock()))

    def abort(self, request_id: str, attempt: int) -> None:
        """Queued or running: its blocks are free at once. Handed over: the lease ends, or, when a
        transfer reads it just now, ends with the transfer."""
        if not self._scheduler.abort(request_id, attempt):
            self._sender.abort_request(request_id, attempt)
            self._end_leases(self._clock())

    def report(self) -> WorkerReport:
        return self._reporter.report(
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            num_queued_tokens=self._scheduler.num_queued_tokens,
        )

    def snapshot(self) -> WorkerReport:
        return self._reporter.snapshot()

    def _hand_over(self, sequence: Sequence) -> SequenceOutput:
        request = sequence.request
        handle = None if sequence.ended else self._lease(sequence)
        output = SequenceOutput(
            request_id=request.request_id,
            attempt=request.attempt,
            token_ids=sequence.newest_token_ids,
            logprobs=sequence.newest_token_logprobs,
            prompt_logprobs=tuple(sequence.prompt_logprobs),
            finish_reason=sequence.finish_reason,
            error=sequence.error,
            handle=handle,
            prefill_times=self._times(sequence),
        )
        sequence.release(self._pool)
        return output

    def _lease(self, sequence: Sequence) -> KVHandle:
        num_full = sequence.num_computed_tokens // self._pool.block_size
        self._pool.lease(sequence.block_ids)
        return self._sender.offer(
            sequence.request,
            blocks=self._pool.refs(sequence.block_ids),
            block_hashes=tuple(sequence.hashes(num_full, self._pool.block_size)),
            num_tokens=sequence.num_computed_tokens,
        )

    def _times(self, sequence: Sequence) -> PrefillTimes:
        started = sequence.first_scheduled
        assert started is not None, "a sequence that was sampled was scheduled before"
        return PrefillTimes(
            queue_s=started - sequence.arrived,
            prefill_s=self._clock() - started,
            num_prompt_tokens=sequence.num_computed_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            num_steps=sequence.num_steps,
        )

    def _end_leases(self, now: float) -> None:
        for lease in self._sender.poll(now):
            self._pool.end_lease(lease.block_ids)
            logger.debug("lease %s ended: %s", lease.handle_id, lease.reason)

    def _fail(self, shares: list[ScheduledSequence], error: Exception) -> list[SequenceOutput]:
        """The step's sequences end with an error and the worker goes on."""
        known = error if isinstance(error, TwostrokeError) else StepFailedError("a step failed")
        for share in shares:
            self._scheduler.abort(*share.key)
        return [
            SequenceOutput(request_id=share.request_id, attempt=share.attempt, error=known)
            for share in shares
        ]
