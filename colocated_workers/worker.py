"""The colocated front end: submit, step, abort, report over an LLMEngine. Runs on one thread; knows
no network.

A request is here from its prompt to its last token. What the engine preempts goes on in it later:
whoever reads the stream sees a pause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.config import EngineConfig
from core.errors import InvalidRequestError, RankLostError, StepFailedError, TwostrokeError
from core.kv import KVHandle
from core.lifetime import DecodeTimes, PrefillTimes
from core.request import GenerateRequest, RequestKey, SequenceOutput
from core.worker import WorkerReport
from engine.batch import Batch, SequenceResult
from engine.executor import Executor
from engine.llm_engine import LLMEngine, StepOutput
from engine.pooling import check_can_generate
from engine.reporter import Reporter
from protocol.worker_server import StepResult

logger = logging.getLogger(__name__)


class ColocatedWorker:
    """Raises InvalidRequestError at construction for an encoder."""

    def __init__(
        self, config: EngineConfig, executor: Executor, clock: Callable[[], float]
    ) -> None:
        check_can_generate(executor.model_config)
        self._executor = _WatchedExecutor(executor)
        self.engine = LLMEngine(config, self._executor)
        self._clock = clock
        self._lives: dict[str, _Life] = {}
        """By request_id: the engine tells requests apart by it."""
        self._reading: dict[RequestKey, _Life] = {}
        """Those without a first token."""
        self._num_steps = 0
        self._reporter = Reporter(self.engine.pool)

    def step(self) -> StepResult:
        if not self._lives:
            return StepResult([], worked=False)
        executor, began = self._executor, self._clock()
        executor.forget()
        try:
            outputs = self.engine.step()
        except RankLostError:
            raise  # the end of this worker
        except Exception as error:
            if error is not executor.error:
                raise  # a bug of ours, not of the model: nobody knows what is left
            logger.exception("a step failed")
            return StepResult(self._fail(error), worked=True)
        self._num_steps += 1
        if self._reading and executor.batch is not None:
            self._note_progress(executor.batch, began)
        worked = executor.batch is not None
        return StepResult([self._output(output) for output in outputs], worked=worked)

    def submit(self, request: GenerateRequest, handle: KVHandle | None) -> None:
        """Raises ContextLengthError or InvalidRequestError; the request is then not here."""
        if handle is not None:
            raise InvalidRequestError("a colocated worker takes no KV handle", param="handle")
        if request.num_choices != 1:
            raise InvalidRequestError("a worker takes one choice per request", param="n")
        earlier = self._lives.get(request.request_id)
        if earlier is not None and earlier.request.attempt < request.attempt:
            self.abort(*earlier.request.key)  # whoever sent it has given it up
        self.engine.add_request(request)
        life = _Life(request, self._clock())
        self._lives[request.request_id] = self._reading[request.key] = life

    def abort(self, request_id: str, attempt: int) -> None:
        """Its blocks are free at once."""
        life = self._lives.get(request_id)
        if life is not None and life.request.attempt == attempt:
            self.engine.abort(request_id, attempt)
            self._forget(life)

    def report(self) -> WorkerReport:
        num_running = self.engine.kv_usage.num_sequences
        return self._reporter.report(
            num_waiting=len(self._lives) - num_running,
            num_running=num_running,
            num_queued_tokens=sum(life.num_uncomputed_tokens for life in self._reading.values()),
        )

    def snapshot(self) -> WorkerReport:
        return self._reporter.snapshot()

    def _note_progress(self, batch: Batch, began: float) -> None:
        for share in batch.sequences:
            life = self._reading.get(share.key)
            if life is None:
                continue
            if life.started is None:
                life.started, life.num_cached_tokens = began, share.num_computed_tokens
            life.num_steps += 1
            life.num_computed_tokens = share.num_computed_tokens + len(share.token_ids)

    def _output(self, output: StepOutput) -> SequenceOutput:
        life, chunk = self._lives[output.request_id], output.chunk
        prefill_times = decode_times = None
        if life.first_token is None and chunk.token_ids:
            prefill_times = self._prefilled(life)
        elif chunk.finish_reason is not None:
            decode_times = self._decode_times(life)
        if chunk.finish_reason is not None or output.error is not None:
            self._forget(life)
        return SequenceOutput(
            request_id=output.request_id,
            attempt=life.request.attempt,
            token_ids=chunk.token_ids,
            logprobs=chunk.logprobs,
            prompt_logprobs=chunk.prompt_logprobs,
            finish_reason=chunk.finish_reason,
            error=output.error,
            prefill_times=prefill_times,
            decode_times=decode_times,
        )

    def _prefilled(self, life: _Life) -> PrefillTimes:
        del self._reading[life.request.key]
        assert life.started is not None, "a sequence that was sampled was scheduled before"
        life.first_token, life.first_step = self._clock(), self._num_steps
        return PrefillTimes(
            queue_s=life.started - life.arrived,
            prefill_s=life.first_token - life.started,
            num_prompt_tokens=life.num_computed_tokens,
            num_cached_tokens=life.num_cached_tokens,
            num_steps=life.num_steps,
        )

    def _decode_times(self, life: _Life) -> DecodeTimes:
        """Preemptions are in it. Nothing waited and nothing moved."""
        assert life.first_token is not None, "an answer has a first token"
        return DecodeTimes(
            queue_s=0.0,
            transfer_s=0.0,
            decode_s=self._clock() - life.first_token,
            num_cached_blocks=0,
            num_pulled_blocks=0,
            num_pulled_bytes=0,
            num_steps=self._num_steps - life.first_step,
        )

    def _forget(self, life: _Life) -> None:
        self._lives.pop(life.request.request_id, None)
        self._reading.pop(life.request.key, None)

    def _fail(self, error: Exception) -> list[SequenceOutput]:
        """The step's sequences end with an error and the worker goes on."""
        batch = self._executor.batch
        assert batch is not None, "a step that failed had a batch"
        known = error if isinstance(error, TwostrokeError) else StepFailedError("a step failed")
        for share in batch.sequences:  # the engine has let go of them
            if (life := self._lives.get(share.request_id)) is not None:
                self._forget(life)
        return [
            SequenceOutput(request_id=share.request_id, attempt=share.attempt, error=known)
            for share in batch.sequences
        ]


@dataclass(slots=True)
class _Life:
    """One request here. Seconds of the worker's clock."""

    request: GenerateRequest
    arrived: float
    started: float | None = None
    """Its first token was scheduled."""
    first_token: float | None = None
    first_step: int = 0
    """Number of the engine's step that gave the first token."""
    num_steps: int = 0
    """Until then."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.request.token_ids) - self.num_computed_tokens


class _WatchedExecutor:
    """An Executor that remembers the last step: who was in it, and how it failed."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.model_config = executor.model_config
        self.kv_cache = executor.kv_cache
        self.layout = executor.layout
        self.layouts = executor.layouts
        self.rank_addresses = executor.rank_addresses
        self.rank_token = executor.rank_token
        self.num_blocks = executor.num_blocks
        self.max_model_len = executor.max_model_len
        self.batch: Batch | None = None
        self.error: Exception | None = None

    def forget(self) -> None:
        self.batch = self.error = None

    def execute(self, batch: Batch) -> tuple[SequenceResult, ...]:
        self.batch, self.error = batch, None
        try:
            return self._executor.execute(batch)
        except Exception as error:
            self.error = error
            raise

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        self._executor.clear_blocks(block_ids)

    def close(self) -> None:
        self._executor.close()
