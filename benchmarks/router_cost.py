"""What a streamed token and a request cost the router: CPU time, without any model.

    python benchmarks/router_cost.py MODEL --streams 32 --tokens 128

The router runs in this process, behind its HTTP port and in front of two workers that answer at
once with the tokens of a text; these and the client live in a child process, so this process's CPU
time is the router's. Then each stage of a token is timed alone. CPU time depends little on what
else the machine does; still, compare two trees by turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core.config import RouterConfig
from core.kv import KVHandle, KVLayout
from core.lifetime import Lifetime, PrefillTimes
from core.request import FinishReason, GenerateRequest, SequenceOutput
from core.sampling_params import SamplingParams
from core.worker import WorkerId, WorkerInfo, WorkerReport, WorkerRole
from protocol.convert import output_from_proto, output_to_proto
from protocol.worker_server import StepResult, WorkerServer
from router.choice import ChoiceRequest, ChoiceText, TextChunk
from router.metrics import RouterMetrics
from router.openai_replies import ChatWriter, CompletionWriter, ReplyHead
from router.prepare import Preparer
from router.prompt_bound import PromptBound
from router.registry import ModelLimits
from router.server import RouterServer, WorkerEndpoint
from router.tokenizer import Tokenizer, load_tokenizer

TEXT = (
    "Serving a language model has two halves. The first reads the prompt, all of it at once, and "
    'is bound by arithmetic; the second writes the answer, token by token ("one at a time"), and '
    "is bound by memory: each of its steps reads every weight. Größe und Übermut, l'été à Paris.\n"
)
LAYOUT = KVLayout(
    model="none",
    dtype="float32",
    block_size=16,
    first_layer=0,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)
LIMITS = ModelLimits(max_model_len=8192, vocab_size=49152)


class EchoWorker:
    """Either kind of worker: a token of `text` for each running request, every `step_s`."""

    def __init__(self, info: WorkerInfo, text: list[int], step_s: float) -> None:
        self._info, self._text, self._step_s = info, text, step_s
        self._running: dict[tuple[str, int], list] = {}
        self._num_reports = 0

    def submit(self, request: GenerateRequest, handle: KVHandle | None) -> None:
        self._running[request.key] = [request, len(request.output_token_ids)]

    def abort(self, request_id: str, attempt: int) -> None:
        self._running.pop((request_id, attempt), None)

    def step(self) -> StepResult:
        if self._running:
            time.sleep(self._step_s)
        outputs = [self._advance(key) for key in tuple(self._running)]
        return StepResult(outputs, worked=bool(outputs))

    def _advance(self, key: tuple[str, int]) -> SequenceOutput:
        state = self._running[key]
        request, state[1] = state[0], state[1] + 1
        prefill = self._info.role is WorkerRole.PREFILL
        last = state[1] >= request.sampling.max_tokens
        if prefill or last:
            del self._running[key]
        return SequenceOutput(
            request_id=request.request_id,
            attempt=request.attempt,
            token_ids=(self._text[state[1] % len(self._text)],),
            finish_reason=FinishReason.LENGTH if last else None,
            handle=self._handle(request) if prefill and not last else None,
            prefill_times=_PREFILL_TIMES if prefill else None,
        )

    def _handle(self, request: GenerateRequest) -> KVHandle:
        return KVHandle(
            handle_id=request.request_id,
            request_id=request.request_id,
            attempt=request.attempt,
            worker=self._info.worker_id.name,
            incarnation=self._info.worker_id.incarnation,
            address=self._info.address,
            layout=LAYOUT,
            blocks=(),
            block_hashes=(),
            num_tokens=len(request.token_ids),
            lease_s=5.0,
        )

    def report(self) -> WorkerReport:
        self._num_reports += 1
        return WorkerReport(
            sequence_number=self._num_reports,
            num_waiting=0,
            num_running=len(self._running),
            num_queued_tokens=0,
            num_free_blocks=10_000,
            num_leased_blocks=0,
            num_cached_blocks=0,
            num_blocks=10_000,
        )

    snapshot = report


_PREFILL_TIMES = PrefillTimes(
    queue_s=0.0, prefill_s=0.0, num_prompt_tokens=1, num_cached_tokens=0, num_steps=1
)


async def start_worker(role: WorkerRole, text: list[int], step_s: float):
    server = WorkerServer()
    info = WorkerInfo(
        worker_id=WorkerId(name=role.value, incarnation="one"),
        role=role,
        address=f"127.0.0.1:{server.bind('127.0.0.1', 0)}",
        model="m",
        layout=LAYOUT,
        num_blocks=10_000,
        max_model_len=LIMITS.max_model_len,
        max_num_seqs=256,
        vocab_size=LIMITS.vocab_size,
        num_threads=1,
        device="cpu",
        pid=0,
    )
    await server.start(EchoWorker(info, text, step_s), info)
    return server, info.address


async def fetch(url: str, path: str, body: dict) -> int:
    """Read one streamed answer to its end; the number of its events that carry text."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    data = json.dumps(body).encode()
    lines = (
        f"POST {path} HTTP/1.1",
        "host: x",
        "connection: close",
        f"content-length: {len(data)}",
    )
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)
    reply = await reader.read()
    writer.close()
    if b" 200 " not in reply[:20]:
        raise SystemExit(reply.decode()[:500])
    return reply.count(b'"text":"') + reply.count(b'{"content":"')


def far_side(pipe, text: list[int], step_s: float) -> None:
    """Main function of the child: two workers, and a client told what to ask for."""

    async def main() -> None:
        roles = (WorkerRole.PREFILL, WorkerRole.DECODE)
        servers = [await start_worker(role, text, step_s) for role in roles]
        pipe.send([address for _, address in servers])
        while (load := await asyncio.to_thread(pipe.recv)) is not None:
            url, path, bodies = load
            counts = await asyncio.gather(*(fetch(url, path, body) for body in bodies))
            pipe.send(sum(counts))
        for server, _ in servers:
            await server.stop(0)

    asyncio.run(main())


def bodies_of(kind: str, tokenizer: Tokenizer, arguments, num_tokens: int) -> list[dict]:
    prompt = tokenizer.decode(words(tokenizer, arguments.prompt))
    asks = {"prompt": prompt}
    if kind == "chat":
        asks = {"messages": [{"role": "user", "content": prompt}]}
    body = {"model": "m", "max_tokens": num_tokens, "ignore_eos": True, "stream": True, **asks}
    return [body] * arguments.streams


def words(tokenizer: Tokenizer, count: int) -> list[int]:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    return (ids * (1 + count // len(ids)))[:count]


PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


async def measure(pipe, url: str, path: str, bodies: list[dict]) -> tuple[float, int]:
    """CPU seconds of this process, and the events that came."""
    before = time.process_time()
    pipe.send((url, path, bodies))
    count = await asyncio.to_thread(pipe.recv)
    return time.process_time() - before, count


async def whole_path(arguments, tokenizer: Tokenizer) -> dict[str, list[float]]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    text = tokenizer.encode(TEXT, add_special_tokens=False)
    child = context.Process(target=far_side, args=(theirs, text, arguments.step_ms / 1e3))
    child.start()
    addresses = await asyncio.to_thread(pipe.recv)
    config = RouterConfig(served_model_name="m", model_path="", port=0)
    router = RouterServer(config, tokenizer)
    await router.start()
    roles = (WorkerRole.PREFILL, WorkerRole.DECODE)
    await router.set_workers(
        [WorkerEndpoint(role=r, address=a) for r, a in zip(roles, addresses, strict=True)]
    )
    while len([s for s in router.registry.statuses() if s.usable]) < 2:
        await asyncio.sleep(0.02)
    costs: dict[str, list[float]] = {}
    with contextlib.closing(pipe):
        for kind, path in PATHS.items():
            costs |= await report(arguments, tokenizer, pipe, router.url, kind, path)
        pipe.send(None)
        await router.stop()
        await asyncio.to_thread(child.join)
    return costs


async def report(
    arguments, tokenizer, pipe, url: str, kind: str, path: str
) -> dict[str, list[float]]:
    """A request's own cost is that of one with two tokens; a token's is the rest."""
    per_token, per_request = [], []
    for _ in range(arguments.repeats):
        short, _ = await measure(pipe, url, path, bodies_of(kind, tokenizer, arguments, 2))
        bodies = bodies_of(kind, tokenizer, arguments, arguments.tokens)
        long, count = await measure(pipe, url, path, bodies)
        assert count >= arguments.streams * arguments.tokens * 0.9, count
        per_token.append(1e6 * (long - short) / arguments.streams / (arguments.tokens - 2))
        per_request.append(1e6 * short / arguments.streams)
    costs = {f"{kind}, us per token": per_token, f"{kind}, us per request": per_request}
    for name, values in costs.items():
        shown = " ".join(f"{value:.1f}" for value in sorted(values))
        print(f"{name:28} median {statistics.median(values):7.1f}   all {shown}")
    return costs


def per_call(run, count: int = 2000, repeats: int = 7) -> float:
    """Microseconds of one call, the best of several rounds."""
    times = []
    for _ in range(repeats):
        before = time.process_time()
        for _ in range(count):
            run()
        times.append((time.process_time() - before) / count)
    return 1e6 * min(times)


def stages(tokenizer: Tokenizer) -> dict[str, float]:
    """Each stage of a token alone, then of a request."""
    text = words(tokenizer, 64)
    request = GenerateRequest(
        request_id="0" * 32, model="m", prompt_token_ids=(1,), sampling=SamplingParams()
    )
    outputs = [SequenceOutput(request_id="0" * 32, attempt=0, token_ids=(i,)) for i in text]
    messages = [output_to_proto(output) for output in outputs]
    choice = ChoiceRequest(
        index=0, request=request, open_text=tokenizer.stream, token_bytes=tokenizer.token_bytes
    )
    writer, stream, metrics = ChoiceText(choice), tokenizer.stream(), RouterMetrics(list)
    head = ReplyHead("0" * 32, 0, "m", include_usage=True, return_token_ids=False, logprobs=False)
    chunk = TextChunk(index=0, text=' "one', token_ids=(5,))
    completion, chat = CompletionWriter(head), ChatWriter(head)
    chat.events(chunk)
    life = Lifetime(request_id="0" * 32, arrived=0.0)
    n = len(text)
    rows = {
        "message to SequenceOutput": per_call(lambda: [*map(output_from_proto, messages)], 100) / n,
        "detokenize": per_call(lambda: [stream.push((i,)) for i in text], 100) / n,
        "detokenize, to chunk": per_call(lambda: [*map(writer.write, outputs)], 100) / n,
        "completion event": per_call(lambda: completion.events(chunk)),
        "chat event": per_call(lambda: chat.events(chunk)),
        "metrics": per_call(lambda: metrics.tokens(life, 1, 0.01)),
    }
    bound = PromptBound.read(tokenizer.to_json())
    preparer = Preparer(model="m", tokenizer=tokenizer, limits=LIMITS, bound=bound)
    for count in (128, 1550):
        prompt = tokenizer.decode(words(tokenizer, count))
        body = json.dumps({"model": "m", "prompt": prompt, "stream": True}).encode()
        rows[f"prepare {count} tokens"] = per_call(lambda b=body: preparer.completion(b, "r"), 50)
    for name, cost in rows.items():
        print(f"{name:28} {cost:8.2f} us")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a GGUF file or a folder with tokenizer.json")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--step-ms", type=float, default=20.0, help="the workers' time per step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.model)
    result = {
        "whole_path": asyncio.run(whole_path(arguments, tokenizer)),
        "stages_us": stages(tokenizer),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
