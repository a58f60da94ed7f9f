"""A live router in front of scripted workers: real gRPC and HTTP, and faults on demand.

A scripted worker speaks worker.proto and holds no model: what it answers is a coroutine per
request, so it can answer, wait, refuse, lie or die at any point. Its tokens are a function of all
tokens before, or the bytes of a given text, so a lost, doubled or misplaced token shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import grpc
import httpx
import pytest

from core.config import RouterConfig
from core.errors import TwostrokeError
from core.kv import BlockRef, KVHandle, KVLayout
from core.lifetime import DecodeTimes, PrefillTimes
from core.prefix import hash_blocks, hash_root
from core.request import FinishReason, GenerateRequest, SequenceOutput, TokenLogprobs
from core.worker import WorkerId, WorkerInfo, WorkerReport, WorkerRole
from protocol import worker_pb2 as pb
from protocol import worker_pb2_grpc
from protocol.convert import (
    handle_from_proto,
    info_to_proto,
    output_to_proto,
    report_to_proto,
    request_from_proto,
)
from router.server import RouterServer, WorkerEndpoint
from router.tokenizer import load_tokenizer

BLOCK_SIZE = 4
LAYOUT = KVLayout(
    model="scripted-weights",
    dtype="float32",
    block_size=BLOCK_SIZE,
    first_layer=0,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)
NUM_BYTES = 256
EOS = 257


def next_token(token_ids) -> int:
    """A language in which every token depends on all tokens before it."""
    text = ",".join(map(str, token_ids)).encode()
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "little") % NUM_BYTES


def right_tokens(prompt, count) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def logprobs_of(token_id: int, position: int, count: int) -> TokenLogprobs:
    """The scripted model's opinion, exact in single precision: one per position, and of the
    `count` likeliest tokens, of which the taken one is the second."""
    logprob = -position / 64
    top = [((token_id + 1) % NUM_BYTES, logprob / 2), (token_id, logprob)]
    top += [(i, logprob - i) for i in range(1, 20) if i not in (top[0][0], token_id)]
    return TokenLogprobs(token_id=token_id, logprob=logprob, top=tuple(top[:count]))


@dataclass
class Call:
    """One submitted request, as a script sees it."""

    worker: ScriptedWorker
    request: GenerateRequest
    handle: KVHandle | None
    outbox: asyncio.Queue

    @property
    def key(self):
        return self.request.request_id, self.request.attempt

    def logprobs(self, token_id: int, count: int) -> tuple[TokenLogprobs, ...]:
        """Of output token number `count`, if asked for."""
        wanted = self.request.sampling.logprobs
        return () if wanted is None else (logprobs_of(token_id, count, wanted),)

    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """With the very first token, if asked for."""
        wanted, prompt = self.request.sampling.prompt_logprobs, self.request.prompt_token_ids
        if wanted is None or self.request.output_token_ids:
            return ()
        return tuple(logprobs_of(prompt[i], 1000 + i, wanted) for i in range(1, len(prompt)))

    def send(self, *token_ids, **fields):
        request_id, attempt = self.key
        output = SequenceOutput(
            request_id=request_id, attempt=attempt, token_ids=tuple(token_ids), **fields
        )
        step = pb.StepOutputs(outputs=[output_to_proto(output)])
        self.outbox.put_nowait(pb.WorkerMessage(step=step))

    def fail(self, error: TwostrokeError):
        self.send(error=error)

    def lease(self) -> KVHandle:
        """A handle on the KV of this request; held until released or taken."""
        request, worker = self.request, self.worker
        tokens = request.token_ids
        root = hash_root(model=LAYOUT.model, salt=request.cache_salt)
        worker.leases.add(self.key)
        return KVHandle(
            handle_id=f"{worker.name}/{request.request_id}/{request.attempt}",
            request_id=request.request_id,
            attempt=request.attempt,
            worker=worker.name,
            incarnation=worker.worker_id.incarnation,
            address=worker.address,
            layouts=(LAYOUT,),
            blocks=tuple(
                BlockRef(block_id=i, generation=1) for i in range(-(-len(tokens) // BLOCK_SIZE))
            ),
            block_hashes=tuple(hash_blocks(tokens, BLOCK_SIZE, root)),
            num_tokens=len(tokens),
            lease_s=5.0,
        )

    def prefilled(self, token_id: int, *, num_cached_tokens=0):
        """The prefill worker's answer: a last token, or a first one and a handle."""
        count = len(self.request.output_token_ids) + 1
        reason = self.request.stop_reason(token_id, count)
        self.send(
            token_id,
            logprobs=self.logprobs(token_id, count),
            prompt_logprobs=self.prompt_logprobs(),
            finish_reason=reason,
            handle=None if reason else self.lease(),
            prefill_times=PrefillTimes(
                queue_s=0.001,
                prefill_s=0.002,
                num_prompt_tokens=len(self.request.token_ids),
                num_cached_tokens=num_cached_tokens,
                num_steps=1,
            ),
        )

    def pull(self):
        """The decode worker takes the KV; checks that it is of the tokens it was given."""
        assert self.handle is not None
        assert self.handle.num_tokens == len(self.request.token_ids) - 1
        assert (self.handle.request_id, self.handle.attempt) == self.key
        peer = self.worker.peers[self.handle.worker]
        assert self.key in peer.leases, "pulled from a lease that is gone"
        peer.leases.discard(self.key)

    def decoded(self, token_id: int, count: int) -> FinishReason | None:
        """One decoded token, `count` output tokens in all. Returns why it was the last, if so."""
        reason = self.request.stop_reason(token_id, count)
        times = DecodeTimes(
            queue_s=0.001,
            transfer_s=0.003,
            decode_s=0.004,
            num_cached_blocks=0,
            num_pulled_blocks=len(self.handle.blocks),
            num_pulled_bytes=len(self.handle.blocks) * LAYOUT.bytes_per_block,
            num_steps=count,
        )
        self.send(
            token_id,
            logprobs=self.logprobs(token_id, count),
            finish_reason=reason,
            decode_times=times if reason else None,
        )
        return reason


Script = Callable[[Call], Awaitable[None]]


async def honest_prefill(call: Call):
    call.prefilled(next_token(call.request.token_ids))


async def honest_decode(call: Call):
    call.pull()
    tokens = list(call.request.token_ids)
    num_prompt = len(call.request.prompt_token_ids)
    reason = None
    while reason is None:
        await asyncio.sleep(call.worker.step_s)
        tokens.append(next_token(tokens))
        reason = call.decoded(tokens[-1], len(tokens) - num_prompt)


async def hang(call: Call):
    await asyncio.Event().wait()


@dataclass(eq=False)
class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    name: str
    role: WorkerRole
    peers: dict[str, ScriptedWorker]
    incarnation: str = "one"
    port: int = 0
    script: Script | None = None
    scripts: list[Script] = field(default_factory=list)
    """Used up first, one per request."""
    info: dict = field(default_factory=dict)
    """Changes to WorkerInfo."""
    step_s: float = 0.0
    leases: set = field(default_factory=set)
    requests: list = field(default_factory=list)
    aborted: list = field(default_factory=list)
    hellos: list = field(default_factory=list)
    outboxes: list = field(default_factory=list)
    tasks: dict = field(default_factory=dict)
    failures: list = field(default_factory=list)
    num_reports: int = 0

    @property
    def worker_id(self):
        return WorkerId(name=self.name, incarnation=self.incarnation)

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    @property
    def endpoint(self):
        return WorkerEndpoint(role=self.role, address=self.address)

    @property
    def num_failures(self):
        """Of scripts. One that the router aborts may find its lease gone before it hears of it."""
        return sum(key not in self.aborted for key, _ in self.failures)

    @property
    def num_held(self):
        return len(self.leases) + len(self.tasks)

    async def start(self):
        self.peers[self.name] = self
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(self.address)
        await self.server.start()

    async def die(self):
        """As a killed process: streams break, what it held is gone."""
        for task in self.tasks.values():
            if task is not asyncio.current_task():
                task.cancel()
        self.leases.clear()
        await self.server.stop(0)

    def worker_info(self):
        info = WorkerInfo(
            worker_id=self.worker_id,
            role=self.role,
            address=self.address,
            model="m",
            layout=LAYOUT,
            num_blocks=1000,
            max_model_len=200,
            max_num_seqs=64,
            vocab_size=300,
            num_threads=1,
            device="cpu",
            pid=1,
        )
        return replace(info, **self.info)

    def report(self, **fields):
        """Send a WorkerReport to every connected router."""
        self.num_reports += 1
        report = WorkerReport(
            sequence_number=self.num_reports,
            **{
                "num_waiting": 0,
                "num_running": 0,
                "num_queued_tokens": 0,
                "num_free_blocks": 1000,
                "num_leased_blocks": 0,
                "num_cached_blocks": 0,
                "num_blocks": 1000,
                **fields,
            },
        )
        for outbox in self.outboxes:
            outbox.put_nowait(pb.WorkerMessage(report=report_to_proto(report)))

    async def Session(self, request_iterator, context):
        outbox = asyncio.Queue()
        self.outboxes.append(outbox)
        reader = asyncio.create_task(self._read(request_iterator, outbox))
        try:
            yield pb.WorkerMessage(info=info_to_proto(self.worker_info()))
            while (message := await outbox.get()) is not None:
                yield message
        finally:
            self.outboxes.remove(outbox)
            reader.cancel()

    async def _read(self, request_iterator, outbox):
        async for message in request_iterator:
            kind = message.WhichOneof("message")
            if kind == "hello":
                self.hellos.append(message.hello.router_id)
            elif kind == "abort":
                self._abort((message.abort.request_id, message.abort.attempt))
            elif kind == "submit":
                self._submit(message.submit, outbox)
        outbox.put_nowait(None)

    def _abort(self, key):
        self.aborted.append(key)
        self.leases.discard(key)
        if task := self.tasks.pop(key, None):
            task.cancel()

    def _submit(self, submit, outbox):
        request = request_from_proto(submit.request)
        handle = handle_from_proto(submit.handle) if submit.HasField("handle") else None
        self.requests.append(request)
        call = Call(self, request, handle, outbox)
        default = honest_prefill if self.role is WorkerRole.PREFILL else honest_decode
        script = self.scripts.pop(0) if self.scripts else self.script or default
        task = asyncio.create_task(script(call))
        self.tasks[call.key] = task
        task.add_done_callback(lambda task: self._done(call.key, task))

    def _done(self, key, task):
        if self.tasks.get(key) is task:
            del self.tasks[key]
        if not task.cancelled() and task.exception():
            self.failures.append((key, task.exception()))


@dataclass
class World:
    """A router, its workers, and an HTTP client."""

    router: RouterServer
    http: httpx.AsyncClient
    workers: dict[str, ScriptedWorker]
    tokenizer: object

    def __getitem__(self, name) -> ScriptedWorker:
        return self.workers[name]

    @property
    def prefill(self):
        return [w for w in self.workers.values() if w.role is WorkerRole.PREFILL]

    @property
    def decode(self):
        return [w for w in self.workers.values() if w.role is WorkerRole.DECODE]

    async def connect(self):
        """Tell the router of all workers and wait until it has them."""
        await self.router.set_workers([worker.endpoint for worker in self.workers.values()])
        await self.until(
            lambda: all(status.info is not None for status in self.router.registry.statuses())
        )

    async def add(self, name, role, **fields) -> ScriptedWorker:
        worker = ScriptedWorker(name, WorkerRole(role), self.workers, **fields)
        await worker.start()
        return worker

    async def until(self, condition, within_s=5.0):
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_nothing_is_held(self):
        """No task or lease on any worker, no request in flight in the router."""
        statuses = self.router.registry.statuses
        await self.until(
            lambda: (
                not any(worker.num_held for worker in self.workers.values())
                and not any(status.num_in_flight for status in statuses())
            )
        )
        assert (await self.http.get("/cluster")).json()["requests_in_flight"] == 0
        workers = self.workers.values()
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: not any(w.num_failures for w in workers), within_s=1)
        assert not any(w.num_failures for w in workers), [w.failures for w in workers]

    def say(self, text, *, eos=True):
        """From now on every answer is `text`, byte by byte, whatever the prompt."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False) if text else []
        tokens += [EOS] if eos else []

        async def prefill(call: Call):
            call.prefilled(tokens[len(call.request.output_token_ids)])

        async def decode(call: Call):
            call.pull()
            for count in range(len(call.request.output_token_ids), len(tokens)):
                await asyncio.sleep(call.worker.step_s)
                if call.decoded(tokens[count], count + 1):
                    return

        for worker in self.prefill:
            worker.script = prefill
        for worker in self.decode:
            worker.script = decode

    async def complete(self, prompt=(1, 2, 3), **fields):
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        body = {"model": "m", "prompt": prompt, "return_token_ids": True, **fields}
        return await self.http.post("/v1/completions", json=body)

    async def stream(self, path="/v1/completions", **body):
        """All events of a stream, [DONE] included as it is."""
        events = []
        async with self.http.stream("POST", path, json={"stream": True, **body}) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    data = line[6:]
                    events.append(data if data == "[DONE]" else json.loads(data))
        return events


@pytest.fixture(scope="session")
def byte_tokenizer(byte_tokenizer_path):
    return load_tokenizer(byte_tokenizer_path)


@pytest.fixture
async def make_world(byte_tokenizer, byte_tokenizer_path):
    """`await make_world(num_prefill=1, num_decode=1, **router_config)`; connected and checked."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(num_prefill=1, num_decode=1, **config):
            settings = {"served_model_name": "m", "model_path": byte_tokenizer_path, "port": 0}
            settings |= {"enable_debug": True, **config}
            router = RouterServer(RouterConfig(**settings), byte_tokenizer)
            await router.start()
            stack.push_async_callback(router.stop)
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=router.url, timeout=20)
            )
            world = World(router, http, {}, byte_tokenizer)
            stack.push_async_callback(stop_workers, world)
            for role, count in (("prefill", num_prefill), ("decode", num_decode)):
                for index in range(count):
                    await world.add(f"{role}-{index}", role)
            await world.connect()
            return world

        yield make


async def stop_workers(world):
    await world.router.stop()
    for worker in world.workers.values():
        await worker.die()


@pytest.fixture
async def world(make_world):
    return await make_world()


@pytest.fixture(scope="session")
def scripts():
    """The building blocks of scripts."""

    class Scripts:
        hang = staticmethod(hang)
        honest_prefill = staticmethod(honest_prefill)
        honest_decode = staticmethod(honest_decode)
        next_token = staticmethod(next_token)
        right_tokens = staticmethod(right_tokens)
        logprobs_of = staticmethod(logprobs_of)
        eos = EOS

        @staticmethod
        def fail(error):
            async def script(call):
                call.fail(error)

            return script

        @staticmethod
        async def die(call):
            await call.worker.die()

        @staticmethod
        def decode_then(count, what):
            """Decode `count` tokens honestly, then do `what(call)`."""

            async def script(call):
                call.pull()
                tokens = list(call.request.token_ids)
                start = len(call.request.output_token_ids)
                for number in range(start + 1, start + count + 1):
                    tokens.append(next_token(tokens))
                    call.decoded(tokens[-1], number)
                await asyncio.sleep(0.02)
                await what(call)

            return script

    return Scripts


@pytest.fixture
def rng():
    return random.Random(11)
