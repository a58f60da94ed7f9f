"""core values <-> protobuf messages. Total both ways; tests/unit/test_convert.py proves it.
A message with an impossible value raises InvalidRequestError, never a traceback
from deep inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from core.errors import InvalidRequestError, TwostrokeError, error_from_code
from core.kv import BlockRef, ChannelOffer, KVHandle, KVLayout, PullRequest
from core.lifetime import DecodeTimes, PrefillTimes
from core.prefix import BlockHash
from core.request import FinishReason, GenerateRequest, SequenceOutput, TokenLogprobs
from core.sampling_params import SamplingParams
from core.worker import WorkerId, WorkerInfo, WorkerReport, WorkerRole
from protocol import worker_pb2 as pb

MAX_RANKS = 1024
"""Of one worker."""


def error_to_proto(error: TwostrokeError) -> pb.Error:
    return pb.Error(code=error.code, message=error.message, param=error.param or "")


def error_from_proto(error: pb.Error) -> TwostrokeError:
    return error_from_code(error.code, error.message, param=error.param or None)


def sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    values = {field.name: getattr(sampling, field.name) for field in fields(sampling)}  # no copies
    values["logit_bias"] = [pb.LogitBias(token_id=i, bias=bias) for i, bias in sampling.logit_bias]
    values["bad_words"] = [pb.BadWord(token_ids=word) for word in sampling.bad_words]
    return pb.SamplingParams(**values)


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    has = message.HasField
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        typical_p=message.typical_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        allowed_token_ids=tuple(message.allowed_token_ids),
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if has("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if has("prompt_logprobs") else None,
    )


def request_to_proto(request: GenerateRequest) -> pb.GenerateRequest:
    if request.num_choices != 1:
        raise InvalidRequestError("a worker takes one choice per request", param="n")
    return pb.GenerateRequest(
        request_id=request.request_id,
        model=request.model,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_proto(request.sampling),
        eos_token_ids=request.eos_token_ids,
        output_token_ids=request.output_token_ids,
        attempt=request.attempt,
        choice_index=request.choice_index,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def request_from_proto(message: pb.GenerateRequest) -> GenerateRequest:
    return GenerateRequest(
        request_id=message.request_id,
        model=message.model,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        eos_token_ids=tuple(message.eos_token_ids),
        output_token_ids=tuple(message.output_token_ids),
        attempt=message.attempt,
        choice_index=message.choice_index,
        cache_salt=message.cache_salt,
        priority=message.priority,
    )


def layout_to_proto(layout: KVLayout) -> pb.KVLayout:
    return pb.KVLayout(**asdict(layout))


def layout_from_proto(message: pb.KVLayout) -> KVLayout:
    return KVLayout(
        model=message.model,
        dtype=message.dtype,
        block_size=message.block_size,
        first_layer=message.first_layer,
        num_layers=message.num_layers,
        first_kv_head=message.first_kv_head,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        inner_order=message.inner_order,
    )


def _refs(block_ids: Sequence[int], generations: Sequence[int]) -> tuple[BlockRef, ...]:
    if len(block_ids) != len(generations):
        raise InvalidRequestError(
            f"{len(block_ids)} block ids but {len(generations)} generations", param="block_ids"
        )
    return tuple(
        BlockRef(block_id=block_id, generation=generation)
        for block_id, generation in zip(block_ids, generations, strict=True)
    )


def _hashes(values: Sequence[bytes]) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(value) for value in values)


def _layouts(messages: Sequence[pb.KVLayout]) -> tuple[KVLayout, ...]:
    if not 1 <= len(messages) <= MAX_RANKS:
        raise InvalidRequestError(
            f"a handle has the layouts of 1 to {MAX_RANKS} ranks, not {len(messages)}",
            param="layouts",
        )
    return tuple(map(layout_from_proto, messages))


def handle_to_proto(handle: KVHandle) -> pb.KVHandle:
    return pb.KVHandle(
        handle_id=handle.handle_id,
        request_id=handle.request_id,
        attempt=handle.attempt,
        worker=handle.worker,
        incarnation=handle.incarnation,
        address=handle.address,
        layouts=map(layout_to_proto, handle.layouts),
        block_ids=[block.block_id for block in handle.blocks],
        block_generations=[block.generation for block in handle.blocks],
        block_hashes=handle.block_hashes,
        num_tokens=handle.num_tokens,
        lease_s=handle.lease_s,
    )


def handle_from_proto(message: pb.KVHandle) -> KVHandle:
    return KVHandle(
        handle_id=message.handle_id,
        request_id=message.request_id,
        attempt=message.attempt,
        worker=message.worker,
        incarnation=message.incarnation,
        address=message.address,
        layouts=_layouts(message.layouts),
        blocks=_refs(message.block_ids, message.block_generations),
        block_hashes=_hashes(message.block_hashes),
        num_tokens=message.num_tokens,
        lease_s=message.lease_s,
    )


def offer_to_proto(offer: ChannelOffer) -> pb.ChannelOffer:
    return pb.ChannelOffer(
        channel_id=offer.channel_id,
        backend=offer.backend,
        store_host=offer.store_host,
        store_port=offer.store_port,
        layout=layout_to_proto(offer.layout),
        incarnation=offer.incarnation,
        max_message_bytes=offer.max_message_bytes,
        source=offer.source,
    )


def offer_from_proto(message: pb.ChannelOffer) -> ChannelOffer:
    return ChannelOffer(
        channel_id=message.channel_id,
        backend=message.backend,
        store_host=message.store_host,
        store_port=message.store_port,
        layout=layout_from_proto(message.layout),
        incarnation=message.incarnation,
        max_message_bytes=message.max_message_bytes,
        source=message.source,
    )


def pull_to_proto(pull: PullRequest) -> pb.PullRequest:
    return pb.PullRequest(
        handle_id=pull.handle_id,
        request_id=pull.request_id,
        attempt=pull.attempt,
        incarnation=pull.incarnation,
        channel_id=pull.channel_id,
        transfer_id=pull.transfer_id,
        first_position=pull.first_position,
        block_ids=[block.block_id for block in pull.blocks],
        block_generations=[block.generation for block in pull.blocks],
        block_hashes=pull.block_hashes,
    )


def pull_from_proto(message: pb.PullRequest) -> PullRequest:
    return PullRequest(
        handle_id=message.handle_id,
        request_id=message.request_id,
        attempt=message.attempt,
        incarnation=message.incarnation,
        channel_id=message.channel_id,
        transfer_id=message.transfer_id,
        first_position=message.first_position,
        blocks=_refs(message.block_ids, message.block_generations),
        block_hashes=_hashes(message.block_hashes),
    )


def info_to_proto(info: WorkerInfo) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        name=info.worker_id.name,
        incarnation=info.worker_id.incarnation,
        role=info.role.value,
        address=info.address,
        model=info.model,
        layout=layout_to_proto(info.layout),
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        vocab_size=info.vocab_size,
        num_threads=info.num_threads,
        device=info.device,
        pid=info.pid,
    )


def info_from_proto(message: pb.WorkerInfo) -> WorkerInfo:
    return WorkerInfo(
        worker_id=WorkerId(name=message.name, incarnation=message.incarnation),
        role=_role(message.role),
        address=message.address,
        model=message.model,
        layout=layout_from_proto(message.layout),
        num_blocks=message.num_blocks,
        max_model_len=message.max_model_len,
        max_num_seqs=message.max_num_seqs,
        vocab_size=message.vocab_size,
        num_threads=message.num_threads,
        device=message.device,
        pid=message.pid,
    )


def _finish_reason(text: str) -> FinishReason | None:
    try:
        return FinishReason(text) if text else None
    except ValueError:
        raise InvalidRequestError(
            f"unknown finish reason {text!r}", param="finish_reason"
        ) from None


def _role(text: str) -> WorkerRole:
    try:
        return WorkerRole(text)
    except ValueError:
        raise InvalidRequestError(f"unknown worker role {text!r}", param="role") from None


def report_to_proto(report: WorkerReport) -> pb.WorkerReport:
    return pb.WorkerReport(**asdict(report))


def report_from_proto(message: pb.WorkerReport) -> WorkerReport:
    return WorkerReport(
        sequence_number=message.sequence_number,
        num_waiting=message.num_waiting,
        num_running=message.num_running,
        num_queued_tokens=message.num_queued_tokens,
        num_free_blocks=message.num_free_blocks,
        num_leased_blocks=message.num_leased_blocks,
        num_cached_blocks=message.num_cached_blocks,
        num_blocks=message.num_blocks,
        stored=_hashes(message.stored),
        evicted=_hashes(message.evicted),
        rss_bytes=message.rss_bytes,
    )


def prefill_times_from_proto(message: pb.PrefillTimes) -> PrefillTimes:
    return PrefillTimes(
        queue_s=message.queue_s,
        prefill_s=message.prefill_s,
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_steps=message.num_steps,
    )


def decode_times_from_proto(message: pb.DecodeTimes) -> DecodeTimes:
    return DecodeTimes(
        queue_s=message.queue_s,
        transfer_s=message.transfer_s,
        decode_s=message.decode_s,
        num_cached_blocks=message.num_cached_blocks,
        num_pulled_blocks=message.num_pulled_blocks,
        num_pulled_bytes=message.num_pulled_bytes,
        num_steps=message.num_steps,
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs:
    if len(message.top_token_ids) != len(message.top_logprobs):
        raise InvalidRequestError("token ids and log probabilities do not pair", param="logprobs")
    return TokenLogprobs(
        token_id=message.token_id,
        logprob=message.logprob,
        top=tuple(zip(message.top_token_ids, message.top_logprobs, strict=True)),
    )


def output_to_proto(output: SequenceOutput) -> pb.SequenceOutput:
    prefill, decode = output.prefill_times, output.decode_times
    return pb.SequenceOutput(
        request_id=output.request_id,
        attempt=output.attempt,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason.value if output.finish_reason else "",
        error=error_to_proto(output.error) if output.error else None,
        handle=handle_to_proto(output.handle) if output.handle else None,
        prefill_times=pb.PrefillTimes(**asdict(prefill)) if prefill else None,
        decode_times=pb.DecodeTimes(**asdict(decode)) if decode else None,
        logprobs=map(logprobs_to_proto, output.logprobs),
        prompt_logprobs=map(logprobs_to_proto, output.prompt_logprobs),
    )


def output_from_proto(message: pb.SequenceOutput) -> SequenceOutput:
    has = message.HasField
    return SequenceOutput(
        request_id=message.request_id,
        attempt=message.attempt,
        token_ids=tuple(message.token_ids),
        finish_reason=_finish_reason(message.finish_reason),
        error=error_from_proto(message.error) if has("error") else None,
        handle=handle_from_proto(message.handle) if has("handle") else None,
        prefill_times=prefill_times_from_proto(message.prefill_times)
        if has("prefill_times")
        else None,
        decode_times=decode_times_from_proto(message.decode_times) if has("decode_times") else None,
        logprobs=tuple(map(logprobs_from_proto, message.logprobs)),
        prompt_logprobs=tuple(map(logprobs_from_proto, message.prompt_logprobs)),
    )
