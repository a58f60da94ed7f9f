"""A step as bytes, for the ranks of a worker that hold no scheduler: typed messages, no pickle.

Total both ways; the other end is this very code. Sampling parameters are only sent to a rank that
samples tokens, since they are most of a small step's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.errors import TwostrokeError
from core.kv import KVLayout
from core.sampling_params import SamplingParams
from engine.batch import (
    Batch,
    BlockCopy,
    Pooling,
    Sampled,
    SampleSpec,
    ScheduledSequence,
    SequenceResult,
)
from protocol import step_pb2 as pb
from protocol.convert import (
    error_from_proto,
    error_to_proto,
    layout_from_proto,
    layout_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)

_NOT_SAMPLED = SampleSpec(sampling=SamplingParams(), choice_index=0, position=0)


class Ready(NamedTuple):
    """What a rank says once, when its part of the model is loaded."""

    layout: KVLayout
    num_blocks: int
    address: str = ""
    """Where it serves its KV."""


class Begin(NamedTuple):
    """All ranks are ready; comes once, before the first step."""

    layouts: tuple[KVLayout, ...]
    token: str
    """What rank 0 shows when it asks a rank for its KV."""


class ClearBlocks(NamedTuple):
    block_ids: tuple[int, ...]


class Stop(NamedTuple):
    """There are no more steps."""


Plan = Begin | Batch | ClearBlocks | Stop


def ready_to_bytes(ready: Ready | TwostrokeError) -> bytes:
    if isinstance(ready, TwostrokeError):
        return pb.Ready(error=error_to_proto(ready)).SerializeToString()
    message = pb.Ready(
        layout=layout_to_proto(ready.layout), num_blocks=ready.num_blocks, address=ready.address
    )
    return message.SerializeToString()


def ready_from_bytes(data: bytes) -> Ready:
    """Raises the error that kept the rank from being ready."""
    message = pb.Ready.FromString(data)
    if message.HasField("error"):
        raise error_from_proto(message.error)
    return Ready(layout_from_proto(message.layout), message.num_blocks, message.address)


def plan_to_bytes(plan: Plan, *, with_sampling: bool = True) -> bytes:
    """`with_sampling`: some rank that gets it samples tokens."""
    match plan:
        case Begin():
            layouts = map(layout_to_proto, plan.layouts)
            message = pb.Plan(begin=pb.Begin(layouts=layouts, token=plan.token))
        case Batch():
            message = pb.Plan(batch=_batch_to_proto(plan, with_sampling))
        case ClearBlocks():
            message = pb.Plan(clear=pb.ClearBlocks(block_ids=plan.block_ids))
        case Stop():
            message = pb.Plan(stop=pb.Stop())
    return message.SerializeToString()


def plan_from_bytes(data: bytes) -> Plan:
    message = pb.Plan.FromString(data)
    match message.WhichOneof("plan"):
        case "begin":
            return Begin(tuple(map(layout_from_proto, message.begin.layouts)), message.begin.token)
        case "batch":
            return _batch_from_proto(message.batch)
        case "clear":
            return ClearBlocks(tuple(message.clear.block_ids))
        case kind:
            assert kind == "stop", kind
            return Stop()


def results_to_bytes(results: Sequence[SequenceResult]) -> bytes:
    return pb.Results(sequences=map(_result_to_proto, results)).SerializeToString()


def results_from_bytes(data: bytes) -> tuple[SequenceResult, ...]:
    return tuple(map(_result_from_proto, pb.Results.FromString(data).sequences))


def _batch_to_proto(batch: Batch, with_sampling: bool) -> pb.Batch:
    return pb.Batch(
        sequences=[_sequence_to_proto(sequence, with_sampling) for sequence in batch.sequences],
        copy_sources=[copy.source for copy in batch.block_copies],
        copy_targets=[copy.target for copy in batch.block_copies],
    )


def _batch_from_proto(message: pb.Batch) -> Batch:
    copies = zip(message.copy_sources, message.copy_targets, strict=True)
    return Batch(
        sequences=tuple(
            _sequence_from_proto(sequence, f"{index}")
            for index, sequence in enumerate(message.sequences)
        ),
        block_copies=tuple(BlockCopy(*copy) for copy in copies),
    )


def _sequence_to_proto(sequence: ScheduledSequence, with_sampling: bool) -> pb.ScheduledSequence:
    spec_to_proto = _spec_to_proto if with_sampling else _nothing
    return pb.ScheduledSequence(
        token_ids=sequence.token_ids,
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=sequence.block_ids,
        samples=map(spec_to_proto, sequence.samples),
        num_prompt_logprobs=sequence.num_prompt_logprobs,
        next_token_ids=sequence.next_token_ids,
        pooling=sequence.pooling or "",
    )


def _nothing(_: SampleSpec) -> pb.SampleSpec:
    return pb.SampleSpec()


def _sequence_from_proto(message: pb.ScheduledSequence, name: str) -> ScheduledSequence:
    has_logprobs = message.HasField("num_prompt_logprobs")
    return ScheduledSequence(
        request_id=name,
        token_ids=tuple(message.token_ids),
        num_computed_tokens=message.num_computed_tokens,
        block_ids=tuple(message.block_ids),
        samples=tuple(map(_spec_from_proto, message.samples)),
        num_prompt_logprobs=message.num_prompt_logprobs if has_logprobs else None,
        next_token_ids=tuple(message.next_token_ids),
        pooling=Pooling(message.pooling) if message.pooling else None,
    )


def _spec_to_proto(spec: SampleSpec) -> pb.SampleSpec:
    return pb.SampleSpec(
        sampling=sampling_to_proto(spec.sampling),
        choice_index=spec.choice_index,
        position=spec.position,
        num_logprobs=spec.num_logprobs,
        prompt_token_ids=spec.prompt_token_ids,
        output_token_ids=spec.output_token_ids,
        barred_token_ids=spec.barred_token_ids,
    )


def _spec_from_proto(message: pb.SampleSpec) -> SampleSpec:
    if not message.HasField("sampling"):
        return _NOT_SAMPLED
    return SampleSpec(
        sampling=sampling_from_proto(message.sampling),
        choice_index=message.choice_index,
        position=message.position,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        prompt_token_ids=tuple(message.prompt_token_ids),
        output_token_ids=tuple(message.output_token_ids),
        barred_token_ids=tuple(message.barred_token_ids),
    )


def _result_to_proto(result: SequenceResult) -> pb.SequenceResult:
    return pb.SequenceResult(
        sampled=map(_sampled_to_proto, result.sampled),
        prompt_logprobs=map(logprobs_to_proto, result.prompt_logprobs),
        is_finite=result.is_finite,
        pooled=None if result.pooled is None else _tensor_to_bytes(result.pooled),
    )


def _result_from_proto(message: pb.SequenceResult) -> SequenceResult:
    return SequenceResult(
        sampled=tuple(map(_sampled_from_proto, message.sampled)),
        prompt_logprobs=tuple(map(logprobs_from_proto, message.prompt_logprobs)),
        is_finite=message.is_finite,
        pooled=_tensor_from_bytes(message.pooled) if message.HasField("pooled") else None,
    )


def _sampled_to_proto(sampled: Sampled) -> pb.Sampled:
    logprobs = sampled.logprobs
    return pb.Sampled(
        token_id=sampled.token_id,
        logprobs=None if logprobs is None else logprobs_to_proto(logprobs),
        all_barred=sampled.all_barred,
    )


def _sampled_from_proto(message: pb.Sampled) -> Sampled:
    return Sampled(
        token_id=message.token_id if message.HasField("token_id") else None,
        logprobs=logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None,
        all_barred=message.all_barred,
    )


def _tensor_to_bytes(vector: Tensor) -> bytes:
    return vector.cpu().numpy().astype("<f4").tobytes()


def _tensor_from_bytes(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32))
