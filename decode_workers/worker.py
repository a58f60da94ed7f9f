"""The decode front end: admit, pull, run. Runs on one thread; knows no network.

A request comes with the first token and a handle on the KV before it. It waits for room, pulls the
blocks this worker lacks, then writes tokens until it ends or must give its blocks to older ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from core.config import EngineConfig
from core.errors import (
    InvalidRequestError,
    PreemptedError,
    RankLostError,
    StepFailedError,
    TwostrokeError,
)
from core.kv import KVHandle
from core.lifetime import DecodeTimes
from core.prefix import hash_root
from core.request import GenerateRequest, RequestKey, SequenceOutput
from core.worker import WorkerReport
from decode_workers.admission import Admission, Arrival
from engine.batch import Batch
from engine.block_pool import BlockPool
from engine.executor import Executor, clear_spoiled, longest_sequence
from engine.pooling import check_can_generate
from engine.reporter import Reporter
from engine.scheduler import DecodeScheduler
from engine.sequence import Sequence
from kv_transfer.plan import plan_pieces
from kv_transfer.receiver import KVReceiver, PullDone
from protocol.worker_server import StepResult

logger = logging.getLogger(__name__)


class DecodeWorker:
    """Raises InvalidRequestError at construction for an encoder."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        pool: BlockPool,
        receiver: KVReceiver,
        clock: Callable[[], float],
    ) -> None:
        check_can_generate(executor.model_config)
        self._executor = executor
        self._pool = pool
        self._receiver = receiver
        self._clock = clock
        self.max_model_len = longest_sequence(executor)
        self._admission = Admission(pool, config.scheduler.max_num_seqs, self.max_model_len)
        self._pulling: dict[RequestKey, Arrival] = {}
        self._aborted: dict[RequestKey, Arrival] = {}
        """Aborted while a transfer writes: quarantined until the transfer has ended."""
        self._arrivals: dict[RequestKey, Arrival] = {}
        """Of running sequences, for their DecodeTimes."""
        self._scheduler = DecodeScheduler(pool, self.max_model_len)
        self._reporter = Reporter(pool)

    def step(self) -> StepResult:
        outputs = self._take_pulled()
        self._admit()
        shares, preempted, block_copies = self._scheduler.schedule()
        outputs += [self._preempt(sequence) for sequence in preempted]
        if not shares:
            return StepResult(outputs, worked=bool(outputs))
        try:
            batch = Batch(sequences=tuple(shares), block_copies=tuple(block_copies))
            results = self._executor.execute(batch)
        except RankLostError:
            raise  # the end of this worker
        except Exception as error:
            logger.exception("a decode step failed")
            known = error if isinstance(error, TwostrokeError) else StepFailedError("a step failed")
            outputs += [self._end(*share.key, known) for share in shares]
            return StepResult(outputs, worked=True)
        stepped = self._scheduler.update(shares, results)
        clear_spoiled(self._executor, stepped)
        outputs += [self._output(sequence) for sequence in stepped]
        return StepResult(outputs, worked=True)

    def submit(self, request: GenerateRequest, handle: KVHandle | None) -> None:
        """Raises TwostrokeError when refused; the handle's owner is then told at once."""
        if handle is None:
            raise InvalidRequestError("a decode worker needs a KV handle", param="handle")
        try:
            request.check(self._executor.model_config.vocab_size)
            self._check_new(request.key)
            plan_pieces(handle.layouts, self._executor.layouts)  # raises where they cannot meet
            root = hash_root(model=self._executor.layout.model, salt=request.cache_salt)
            sequence = Sequence(request, root, now=self._clock())
            self._admission.add(Arrival(sequence=sequence, handle=handle))
        except TwostrokeError as error:
            self._receiver.release(handle, f"refused: {error.code}")
            raise
        self._receiver.hold(handle)

    def _check_new(self, key: RequestKey) -> None:
        """A transfer reports by this key: a second one of the same would be taken for the first."""
        waiting = any(arrival.sequence.key == key for arrival in self._admission.waiting)
        if waiting or key in self._pulling or key in self._aborted or key in self._arrivals:
            raise InvalidRequestError("this attempt is already here", param="request_id")

    def abort(self, request_id: str, attempt: int) -> None:
        """Blocks are free at once, but those a transfer writes into only when it has ended."""
        key = (request_id, attempt)
        if (arrival := self._admission.abort(*key)) is not None:
            self._receiver.release(arrival.handle, "aborted")
        elif (arrival := self._pulling.pop(key, None)) is not None:
            self._quarantine(arrival)
            self._aborted[key] = arrival
            self._receiver.cancel(*key)
        elif self._scheduler.abort(*key):
            del self._arrivals[key]

    def report(self) -> WorkerReport:
        return self._reporter.report(
            num_waiting=len(self._admission.waiting) + len(self._pulling),
            num_running=len(self._scheduler.running),
            num_queued_tokens=0,  # what waits here is computed already
        )

    def snapshot(self) -> WorkerReport:
        return self._reporter.snapshot()

    def _admit(self) -> None:
        while True:
            num_running = len(self._scheduler.running) + len(self._pulling)
            arrival = self._admission.admit(num_running)
            if arrival is None:
                return
            arrival.admitted = self._clock()
            self._pulling[arrival.sequence.key] = arrival
            first_position = arrival.num_local_blocks * self._pool.block_size
            self._receiver.start(arrival.handle, first_position, arrival.pulled_block_ids)

    def _take_pulled(self) -> list[SequenceOutput]:
        outputs = []
        for done in self._receiver.poll():
            key = (done.request_id, done.attempt)
            if (aborted := self._aborted.pop(key, None)) is not None:
                self._pool.end_quarantine(aborted.pulled_block_ids)
                continue
            arrival = self._pulling.pop(key)
            if done.error is not None:
                arrival.sequence.release(self._pool)
                outputs.append(_error(key, done.error))
            else:
                self._start(arrival, done)
        return outputs

    def _start(self, arrival: Arrival, done: PullDone) -> None:
        """The KV is complete and verified: only now may others find it."""
        sequence = arrival.sequence
        arrival.done = done
        arrival.pulled = self._clock()
        sequence.num_computed_tokens = arrival.handle.num_tokens
        sequence.num_cached_tokens = arrival.handle.num_tokens
        sequence.cache_full_blocks(self._pool)
        self._arrivals[sequence.key] = arrival
        self._scheduler.add(sequence)

    def _quarantine(self, arrival: Arrival) -> None:
        local = arrival.sequence.block_ids[: arrival.num_local_blocks]
        self._pool.free(local)
        self._pool.quarantine(arrival.pulled_block_ids)

    def _preempt(self, sequence: Sequence) -> SequenceOutput:
        del self._arrivals[sequence.key]
        return _error(sequence.key, PreemptedError("sequences before it needed its KV blocks"))

    def _end(self, request_id: str, attempt: int, error: TwostrokeError) -> SequenceOutput:
        self.abort(request_id, attempt)
        return _error((request_id, attempt), error)

    def _output(self, sequence: Sequence) -> SequenceOutput:
        request_id, attempt = sequence.key
        times = self._times(self._arrivals.pop(sequence.key)) if sequence.ended else None
        return SequenceOutput(
            request_id=request_id,
            attempt=attempt,
            token_ids=sequence.newest_token_ids,
            logprobs=sequence.newest_token_logprobs,
            finish_reason=sequence.finish_reason,
            error=sequence.error,
            decode_times=times,
        )

    def _times(self, arrival: Arrival) -> DecodeTimes:
        sequence, done = arrival.sequence, arrival.done
        assert done is not None, "it decoded, so its KV had come"
        return DecodeTimes(
            queue_s=arrival.admitted - sequence.arrived,
            transfer_s=arrival.pulled - arrival.admitted,
            decode_s=self._clock() - arrival.pulled,
            num_cached_blocks=arrival.num_local_blocks,
            num_pulled_blocks=done.num_blocks,
            num_pulled_bytes=done.num_bytes,
            num_steps=sequence.num_steps,
        )


def _error(key: RequestKey, error: TwostrokeError) -> SequenceOutput:
    return SequenceOutput(request_id=key[0], attempt=key[1], error=error)
