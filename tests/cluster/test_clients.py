"""What users point at us, unmodified: the openai client and curl; and the errors they then see."""

import asyncio
import json
import shutil

import openai
import pytest


@pytest.fixture
async def cluster(cluster_of, tiny_model):
    async with cluster_of(tiny_model) as running:
        yield running


async def test_openai_client_streams_a_chat(cluster):
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused") as client:
        whole = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=12, temperature=0
        )
        stream = await client.chat.completions.create(
            model="m",
            messages=messages,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        pieces, usage = [], None
        async for chunk in stream:
            usage = chunk.usage or usage
            pieces += [choice.delta.content or "" for choice in chunk.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        assert usage is not None
        assert whole.usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens == 12
        assert usage.prompt_tokens == whole.usage.prompt_tokens
        assert [model.id async for model in client.models.list()] == ["m"]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-9", messages=messages)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "long " * 3000}], stream=True
            )


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT = {"model": "m", "prompt": "hi", "max_tokens": 4}
BAD = {
    "unknown model": (404, {**CHAT, "model": "gpt-9"}),
    "malformed JSON": (400, b'{"model": "m", '),
    "prompt too long": (400, {**TEXT, "prompt": [1] * 3000}),
    "prompt too long, streamed": (400, {**TEXT, "prompt": [1] * 3000, "stream": True}),
    "unknown field": (400, {**TEXT, "temprature": 1}),
}


async def replies(cluster):
    """(kind, body) of everything the API says: whole, streamed, lists and errors."""
    for path, body, kind in (
        ("/v1/chat/completions", CHAT, "chat.completion"),
        ("/v1/completions", TEXT, "text_completion"),
    ):
        yield kind, (await cluster.http.post(path, json=body)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        reply = await cluster.http.post(path, json={**body, **options})
        events = [line[6:] for line in reply.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] <= 4
        assert len({chunk["id"] for chunk in chunks}) == 1
        for chunk in chunks:
            yield f"{kind}.chunk", chunk
    yield "list", (await cluster.http.get("/v1/models")).json()
    for status, bad in BAD.values():
        content = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
        path = "/v1/chat/completions" if b"messages" in content else "/v1/completions"
        reply = await cluster.http.post(path, content=content)
        assert reply.status_code == status, reply.text
        yield "error", reply.json()


async def test_replies_chunks_and_errors_have_the_shape_clients_rely_on(cluster, openai_schemas):
    async for kind, body in replies(cluster):
        openai_schemas(kind, body)


async def test_replies_chunks_and_errors_are_what_openai_specifies(cluster, official_schemas):
    async for kind, body in replies(cluster):
        official_schemas(kind, body)


async def test_layouts_that_cannot_meet_are_refused_with_the_reason(cluster_of, tiny_model):
    async with cluster_of(tiny_model, decode_cache={"block_size": 24}) as cluster:
        reply = await cluster.http.post("/v1/completions", json=TEXT)
        assert reply.status_code == 503, reply.text
        error = reply.json()["error"]
        assert error["code"] == "handshake_refused"
        assert "block_size differs: 16" in error["message"]
        await cluster.until_nothing_is_held(within_s=1)


@pytest.mark.parametrize(
    "decode_cache",
    [{"block_size": 64, "num_blocks": 64}, {"block_size": 8}, {"block_size": 4, "num_blocks": 900}],
    ids=["64", "8", "4"],
)
async def test_blocks_of_another_size_are_taken_as_they_come(cluster_of, tiny_model, decode_cache):
    """Lengths around the ends of both sizes' blocks; the second time over, both workers have the
    beginning in their caches, each in its own blocks."""
    prompts = [list(range(1, 1 + n)) for n in (1, 15, 16, 17, 48, 63, 64, 65, 66, 100, 129)]
    async with cluster_of(tiny_model, num_colocated=1) as cluster:
        expected = [await cluster.complete(prompt, 8) for prompt in prompts]
    async with cluster_of(tiny_model, decode_cache=decode_cache) as cluster:
        for _ in range(2):
            assert [await cluster.complete(prompt, 8) for prompt in prompts] == expected
        await cluster.until_nothing_is_held(within_s=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
async def test_a_decode_worker_may_keep_kv_in_fewer_bits(cluster_of, tiny_model, dtype):
    """KV is converted on the way; the second answer finds the beginning in both caches, and is the
    same."""
    prompts = [list(range(1, 1 + n)) for n in (5, 17, 40, 64)]
    async with cluster_of(tiny_model, decode_cache={"dtype": dtype}) as cluster:
        for prompt in prompts:
            tokens = await cluster.complete(prompt, 4)
            assert tokens == await cluster.complete(prompt, 4)
            assert len(tokens) == 4
        await cluster.until_nothing_is_held(within_s=1)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_streams_a_chat(cluster):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    process = await asyncio.create_subprocess_exec(
        "curl",
        "-sSN",
        f"{cluster.url}/v1/chat/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        json.dumps({**body, "max_tokens": 5}),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    events = [line for line in output.decode().split("\n\n") if line]
    assert process.returncode == 0
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events)
    assert json.loads(events[0][6:])["choices"][0]["delta"]["role"] == "assistant"


async def test_timeline_tells_where_the_time_went(cluster):
    prompt = list(range(100))
    reply = await cluster.http.post(
        "/v1/completions",
        json={"model": "m", "prompt": prompt, "max_tokens": 5, "ignore_eos": True},
    )
    life = (await cluster.http.get(f"/debug/requests/{reply.headers['x-request-id']}")).json()
    assert life["prefill_worker"].startswith("prefill-0")
    assert life["decode_worker"].startswith("decode-0")
    assert life["prefill"]["num_prompt_tokens"] == 100
    assert life["decode"]["num_pulled_blocks"] == 7
    layout = cluster.workers[0].info.layout
    assert life["decode"]["num_pulled_bytes"] == 7 * layout.bytes_per_block
    assert life["outcome"] == "length"
    again = await cluster.http.post(
        "/v1/completions",
        json={"model": "m", "prompt": prompt, "max_tokens": 5, "ignore_eos": True},
    )
    life = (await cluster.http.get(f"/debug/requests/{again.headers['x-request-id']}")).json()
    assert life["prefill"]["num_cached_tokens"] == 96
    assert life["decode"]["num_cached_blocks"] == 6, "only the blocks the decode side lacks move"
    assert life["decode"]["num_pulled_blocks"] == 1


async def until_streaming(cluster, body):
    """Begin a stream; returns (response context, line iterator) after the first token."""
    request = cluster.http.build_request("POST", "/v1/completions", json=body)
    response = await cluster.http.send(request, stream=True)
    lines = response.aiter_lines()
    seen = 0
    async for line in lines:
        seen += line.startswith("data: {")
        if seen >= 3:
            return response, lines
    raise AssertionError("the stream ended early")


LONG_ANSWER = {
    "model": "m",
    "prompt": list(range(50)),
    "max_tokens": 1500,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}


async def test_only_decode_worker_killed_mid_stream_is_an_error_event_and_the_router_lives(cluster):
    response, lines = await until_streaming(cluster, LONG_ANSWER)
    cluster.decode[0].kill()
    async with asyncio.timeout(30):
        events = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
    await response.aclose()
    error = events[-1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] in ("worker_lost", "worker_unavailable")
    health = await cluster.http.get("/health")
    assert health.status_code == 503
    refused = await cluster.http.post(
        "/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 2}
    )
    assert refused.status_code == 503
    assert (await cluster.http.get("/v1/models")).status_code == 200
    # the prefill worker's lease ends by itself: nobody is left to pull
    async with asyncio.timeout(10):
        while cluster.prefill[0].pool().num_held:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("fault", ["killed", pytest.param("frozen", marks=pytest.mark.slow)])
async def test_another_decode_worker_continues_the_stream(cluster_of, tiny_model, fault):
    """No token lost, none doubled. A frozen process is noticed by its missing pings, and when it
    wakes up its old stream is over."""
    async with cluster_of(tiny_model, num_decode=2) as cluster:
        body = {**LONG_ANSWER, "max_tokens": 400}
        expected = await cluster.complete(body["prompt"], 400)
        request = cluster.http.build_request("POST", "/v1/completions", json=body)
        response = await cluster.http.send(request, stream=True)
        tokens, victim, started = [], None, asyncio.get_running_loop().time()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
            if len(tokens) > 20 and victim is None:
                life = await cluster.http.get(f"/debug/requests/{response.headers['x-request-id']}")
                name = life.json()["decode_worker"]
                victim = next(w for w in cluster.decode if name.startswith(w.config.name))
                victim.kill() if fault == "killed" else victim.freeze()
        await response.aclose()
        assert victim is not None
        assert tokens == expected
        assert asyncio.get_running_loop().time() - started < 40
        if fault == "frozen":
            victim.thaw()
            await cluster.until_nothing_is_held(within_s=5)
