"""The colocated engine: both schedulers over one pool and one executor, no network.

It is the baseline that disaggregation is measured against and the oracle its tokens must equal.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from core.config import EngineConfig
from core.errors import ContextLengthError, InvalidRequestError, TwostrokeError
from core.prefix import BlockHash, hash_root
from core.request import GenerateRequest, RequestKey, TokenChunk
from core.worker import Progress
from engine.batch import Batch, SequenceResult
from engine.beam_search import BeamGroup, BeamSearchParams
from engine.block_pool import BlockPool
from engine.executor import Executor, LocalExecutor, clear_spoiled, longest_sequence
from engine.pooling import PoolingRequest, check_can_generate, pooled_vector
from engine.scheduler import DecodeScheduler, PrefillScheduler, Reserved
from engine.sequence import Sequence as EngineSequence


class StepOutput(NamedTuple):
    """New tokens of one choice of a request in one step."""

    request_id: str
    chunk: TokenChunk
    choice_index: int = 0
    pooled: Tensor | None = None
    """Of a pooling request, instead of tokens: [hidden_size] float32 (CLASSIFY: [num_labels])."""
    error: TwostrokeError | None = None
    """Set: the choice failed alone, without a token in this step."""


class KVUsage(NamedTuple):
    """How well the pool is used. Blocks and slots (positions) of this moment."""

    num_blocks: int
    num_used_blocks: int
    """Referenced by sequences; cached ones are free to be taken."""
    num_sequences: int
    """Reading a prompt or writing an answer."""
    num_empty_slots: int
    """In blocks of answering sequences, behind their last token: the waste inside blocks."""
    num_preemptions: int
    """Since the start."""
    num_used_at_preemption: int | None
    """The fewest blocks in use when an answer found no block to grow into; None: it never was so.
    """

    @property
    def used(self) -> float:
        return self.num_used_blocks / self.num_blocks


class LLMEngine:
    """`add_request`, then `step` until `has_unfinished_requests` is false."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self._executor = executor
        self.model_config = executor.model_config
        self.pool = BlockPool.for_cache(executor.num_blocks, config.cache)
        self.max_model_len = longest_sequence(executor)
        self._prefill = PrefillScheduler(config.scheduler, self.pool, self.max_model_len)
        self._decode = DecodeScheduler(self.pool, self.max_model_len)
        self._beams: dict[RequestKey, BeamGroup] = {}
        self._num_preemptions = 0

    @classmethod
    def from_config(cls, config: EngineConfig, progress: Progress | None = None) -> LLMEngine:
        return cls(config, LocalExecutor.from_config(config, progress))

    def step(self) -> list[StepOutput]:
        """One forward pass over every decoding sequence and as many prompt chunks as fit."""
        self._yield_to_more_important()
        decode = self._decode.schedule()
        self._requeue(decode.preempted)
        prefill = self._prefill.schedule(time.monotonic(), self._reserved())
        if not decode.shares and not prefill:
            # Only beams that wait for room may be left, and parked ones that hold it.
            return self.step() if self._release_parked() else []
        batch = Batch(sequences=(*decode.shares, *prefill), block_copies=tuple(decode.block_copies))
        results = self._execute(batch)
        split = len(decode.shares)
        stepped = self._decode.update(decode.shares, results[:split])
        read = self._prefill.update(prefill, results[split:])
        outputs = [output for s in (*stepped, *read) for output in self._outputs(s)]
        for sequence in read:
            self._hand_on(sequence)
        clear_spoiled(self._executor, [*stepped, *read])
        return outputs

    def _execute(self, batch: Batch) -> tuple[SequenceResult, ...]:
        """A step that raises ends all requests in it: what it has written nobody knows."""
        try:
            return self._executor.execute(batch)
        except BaseException:
            for share in batch.sequences:
                self.abort(*share.key)
            raise

    def _hand_on(self, sequence: EngineSequence) -> None:
        if sequence.ended:
            sequence.release(self.pool)
        elif not sequence.num_candidates:
            self._decode.add(sequence)

    def _outputs(self, sequence: EngineSequence) -> list[StepOutput]:
        if not sequence.num_candidates:
            return [_output(sequence)]
        group = self._beams.get(sequence.key)
        if group is None:  # another beam of it failed in this step
            sequence.release(self.pool)
            return []
        first = sequence.request.choice_index
        if sequence.error is not None:
            self.abort(*sequence.key)
            return [_output(sequence)._replace(choice_index=first)]
        for beam in group.collect(sequence, self.pool):
            (self._decode if beam.block_ids else self._prefill).add(beam)
        if not group.is_over:
            return []
        del self._beams[sequence.key]
        return [
            StepOutput(request_id=sequence.request.request_id, choice_index=index, chunk=chunk)
            for index, chunk in enumerate(group.choices(), first)
        ]

    def _release_parked(self) -> bool:
        """The beams of one search give their blocks back, so that others of it can be computed."""
        return any(group.release_parked(self.pool) for group in reversed(self._beams.values()))

    def _yield_to_more_important(self) -> None:
        """A waiting sequence that does not fit takes the place of less important answers, as few
        of them as will do; none, if all of them would not."""
        if not self._prefill.waiting:
            return
        head = self._prefill.waiting[0]
        victims = self._decode.less_important_than(head)
        if not victims or self._fits(head) or not self._fits(head, without=victims):
            return
        while not self._fits(head):
            victim = victims.pop()
            self._decode.preempt(victim)
            self._requeue([victim])

    def _fits(self, head: EngineSequence, without: Sequence[EngineSequence] = ()) -> bool:
        """In this step, beside the running answers, which may take blocks in it and one each later;
        once those `without` are preempted. Blocks that head would share with these are no gain."""
        stay = [sequence for sequence in self._decode.running if sequence not in without]
        num_freed = self.pool.num_freed_by(
            [sequence.block_ids for sequence in without], besides=self._prefill.cached_blocks(head)
        )
        num_blocks = len(stay) + self._decode.num_blocks_wanted(stay) - num_freed
        reserved = Reserved(num_tokens=len(stay), num_blocks=num_blocks, num_seqs=len(stay))
        return self._prefill.fits(head, reserved)

    def _reserved(self) -> Reserved:
        """Each running answer takes a token of the step and may grow by a block."""
        num_seqs = len(self._decode.running)
        return Reserved(num_tokens=num_seqs, num_blocks=num_seqs, num_seqs=num_seqs)

    def _requeue(self, preempted: list[EngineSequence]) -> None:
        self._num_preemptions += len(preempted)
        for sequence in reversed(preempted):
            self._prefill.add(sequence, first=True)

    def add_request(self, request: GenerateRequest) -> None:
        """Raises InvalidRequestError, ContextLengthError when the prompt leaves no room."""
        self._prefill.add(self._sequence(request))

    def add_beam_search(self, request: GenerateRequest, params: BeamSearchParams) -> None:
        """Its choices come all at once, best first, in the step that ends the search. Raises as
        add_request, and for sampling parameters that a search has no use for."""
        if params.beam_width > self.model_config.vocab_size:
            raise InvalidRequestError(
                f"beam_width is {params.beam_width}, the vocabulary has only "
                f"{self.model_config.vocab_size} tokens",
                param="beam_width",
            )
        sequence = self._sequence(request)
        group = BeamGroup.start(request, params, sequence, self.max_model_len)
        self._beams[request.key] = group
        self._prefill.add(sequence)

    def add_pooling_request(self, request: PoolingRequest) -> None:
        """A vector instead of tokens. Raises InvalidRequestError, ContextLengthError."""
        request.check(self.model_config, self.max_model_len)
        self._check_new(request.request_id)
        root = self._root(request.cache_salt)
        self._prefill.add(request.sequence(root, self.model_config, now=time.monotonic()))

    def _sequence(self, request: GenerateRequest) -> EngineSequence:
        check_can_generate(self.model_config)
        request.check(self.model_config.vocab_size)
        self._check_new(request.request_id)
        if len(request.token_ids) >= self.max_model_len:
            raise ContextLengthError(
                f"{len(request.token_ids)} tokens do not fit into a context of {self.max_model_len}"
            )
        return EngineSequence(request, self._root(request.cache_salt), now=time.monotonic())

    def _check_new(self, request_id: str) -> None:
        """Outputs are told apart by it."""
        if self._has(request_id):
            raise InvalidRequestError(f"request {request_id!r} is already here", param="request_id")

    def _has(self, request_id: str) -> bool:
        searched = any(request_id == key[0] for key in self._beams)
        return searched or self._prefill.has(request_id) or self._decode.has(request_id)

    def _root(self, cache_salt: str) -> BlockHash:
        return hash_root(model=self._executor.layout.model, salt=cache_salt)

    def abort(self, request_id: str, attempt: int = 0) -> bool:
        """Forget the request and free its blocks; False when it is not here."""
        gone = [scheduler.abort(request_id, attempt) for scheduler in (self._prefill, self._decode)]
        group = self._beams.pop((request_id, attempt), None)
        if group is not None:
            group.release_parked(self.pool)
        return group is not None or any(gone)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._decode.running or self._beams) or not self._prefill.idle

    @property
    def kv_usage(self) -> KVUsage:
        block_size = self.pool.block_size
        return KVUsage(
            num_blocks=self.pool.num_blocks,
            num_used_blocks=self.pool.num_blocks - self.pool.num_available,
            num_sequences=len(self._decode.running) + len(self._prefill.running),
            num_empty_slots=sum(
                len(sequence.block_ids) * block_size - sequence.num_computed_tokens
                for sequence in self._decode.running
            ),
            num_preemptions=self._num_preemptions,
            num_used_at_preemption=self._decode.num_used_at_preemption,
        )

    def generate(self, requests: Sequence[GenerateRequest]) -> list[TokenChunk]:
        """Run all requests to their end; one chunk per choice, in the order of `requests` and
        choices. Raises the first error any of them ends with. What was added before runs along, and
        its outputs are lost."""
        with self._aborting(request.key for request in requests):
            for request in requests:
                self.add_request(request)
            return self._run(requests)

    def beam_search(self, request: GenerateRequest, params: BeamSearchParams) -> list[TokenChunk]:
        """The `num_choices` best answers, best first."""
        with self._aborting([request.key]):
            self.add_beam_search(request, params)
            return self._run([request])

    def pool_all(self, requests: Sequence[PoolingRequest]) -> list[Tensor]:
        """One vector each, in order. Raises the first error any of them ends with. What was added
        before runs along, and its outputs are lost."""
        vectors: dict[str, Tensor | None] = {request.request_id: None for request in requests}
        with self._aborting((request_id, 0) for request_id in vectors):
            for request in requests:
                self.add_pooling_request(request)
            while any(vector is None for vector in vectors.values()):
                for output in self.step():
                    if output.request_id in vectors:
                        vectors[output.request_id] = _vector(output)
        return [vector for vector in vectors.values() if vector is not None]

    @contextmanager
    def _aborting(self, keys: Iterable[RequestKey]) -> Iterator[None]:
        """Whatever is raised, none of these stays behind; one that was here before does."""
        new = [key for key in keys if not self._has(key[0])]
        try:
            yield
        finally:
            for key in new:
                self.abort(*key)

    def _run(self, requests: Sequence[GenerateRequest]) -> list[TokenChunk]:
        chunks: dict[tuple[str, int], list[TokenChunk]] = defaultdict(list)
        while self.has_unfinished_requests:
            for output in self.step():
                if output.error is not None:
                    raise output.error
                chunks[output.request_id, output.choice_index].append(output.chunk)
        return [
            joined(chunks[request.request_id, request.choice_index + index])
            for request in requests
            for index in range(request.num_choices)
        ]


def _vector(output: StepOutput) -> Tensor:
    if output.error is not None:
        raise output.error
    assert output.pooled is not None, f"{output.request_id} was asked for a vector"
    return output.pooled


def joined(chunks: Sequence[TokenChunk]) -> TokenChunk:
    """All chunks of one choice as one."""
    return TokenChunk(
        token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        prompt_logprobs=tuple(chain.from_iterable(chunk.prompt_logprobs for chunk in chunks)),
        score=chunks[-1].score,
        finish_reason=chunks[-1].finish_reason,
    )


def best_of(choices: Sequence[TokenChunk], n: int) -> list[TokenChunk]:
    """The n choices with the highest mean log probability per token, best first. They must have
    been generated with logprobs."""

    def mean(choice: TokenChunk) -> float:
        assert choice.logprobs, "best_of compares log probabilities"
        return sum(item.logprob for item in choice.logprobs) / len(choice.logprobs)

    return sorted(choices, key=mean, reverse=True)[:n]


def _output(sequence: EngineSequence) -> StepOutput:
    """Drains the sequence's prompt_logprobs: they are told once."""
    prompt_logprobs, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), []
    return StepOutput(
        request_id=sequence.request.request_id,
        choice_index=sequence.choice_index,
        chunk=TokenChunk(
            token_ids=sequence.newest_token_ids,
            logprobs=sequence.newest_token_logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=sequence.finish_reason,
        ),
        pooled=pooled_vector(sequence) if sequence.pooling and not sequence.error else None,
        error=sequence.error,
    )
