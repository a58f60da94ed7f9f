"""The HTTP API from outside: shapes, streams, limits and errors, against a live server."""

import asyncio
import contextlib
import json
import logging
import re
import threading
import time

import httpx
import jsonschema
import openai
import pytest

from core.errors import InternalError
from core.sampling_params import SamplingParams
from router.http_errors import BodyTooLargeError, http_error

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
A, SPACE = 64, 220
"""Their token ids."""
POEM = "Grüße, 世界! 🌶️🌶️ naïve — done"


@pytest.fixture
async def client(world):
    async with openai.AsyncOpenAI(
        base_url=f"{world.router.url}/v1", api_key="unused", max_retries=0
    ) as client:
        yield client


def assert_error(reply, status, code, param=None):
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert reply.headers["x-request-id"]
    if 400 <= status < 500 and status != 429:
        assert reply.headers["x-should-retry"] == "false"
    return error


async def test_openai_client_chats(world, client):
    world.say(POEM)
    reply = await client.chat.completions.create(**CHAT)
    assert reply.choices[0].message.content == POEM
    assert reply.choices[0].finish_reason == "stop"
    num_bytes = len(POEM.encode())
    assert reply.usage.completion_tokens == num_bytes + 1, "EOS counts"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + num_bytes + 1
    assert reply.usage.prompt_tokens == len("user: hi\nassistant: ")
    assert reply._request_id in reply.id


async def test_openai_client_streams_what_it_gets_whole(world, client):
    world.say(POEM)
    stream = await client.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    *parts, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == len(POEM.encode()) + 1
    deltas = [part.choices[0].delta for part in parts]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == POEM
    assert all("\ufffd" not in (delta.content or "") for delta in deltas)
    reasons = [part.choices[0].finish_reason for part in parts]
    assert reasons == [None] * (len(parts) - 1) + ["stop"]
    assert parts[-1].choices[0].delta.model_dump(exclude_unset=True) == {}


async def test_openai_client_completes(world, client):
    world.say("some words that go on and on")
    reply = await client.completions.create(model="m", prompt="x")
    assert reply.usage.completion_tokens == 16, "OpenAI's default"
    assert reply.choices[0].finish_reason == "length"
    stream = await client.completions.create(model="m", prompt="x", stream=True, max_tokens=99)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == "some words that go on and on"


async def test_the_first_token_does_not_wait_for_decode(world, scripts):
    world.say("abc")
    world["decode-0"].script = scripts.hang
    for path, body in (
        ("/v1/completions", {"model": "m", "prompt": "x", "return_token_ids": True}),
        ("/v1/chat/completions", CHAT),
    ):
        async with (
            asyncio.timeout(5),
            world.http.stream("POST", path, json={**body, "stream": True}) as response,
        ):
            text = ""
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    [choice] = json.loads(line[6:])["choices"]
                    text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                    if text:
                        break
            assert (text, choice["finish_reason"]) == ("a", None)
        await world.until_nothing_is_held()


async def test_usage_is_null_in_all_chunks_but_the_last(world):
    world.say("abc")
    events = await world.stream(
        "/v1/chat/completions", **CHAT, stream_options={"include_usage": True}
    )
    *parts, last, done = events
    assert done == "[DONE]"
    assert all(part["usage"] is None for part in parts)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert all(
        "usage" not in part for part in (await world.stream("/v1/chat/completions", **CHAT))[:-1]
    )


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("three", "one two "),
        (["zzz", "two"], "one "),
        (["e t", "two three"], "on"),
        ("o", ""),
        ("four?", "one two three four!"),
        (["four!", "ee fo"], "one two thr"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_are_never_sent(world, stop, text, stream):
    world.say("one two three four!")
    body = {"model": "m", "prompt": "x", "stop": stop, "max_tokens": 100}
    if stream:
        events = await world.stream(**body)
        pieces = [event["choices"][0] for event in events if event != "[DONE]"]
        assert "".join(piece["text"] for piece in pieces) == text
        assert [p["finish_reason"] for p in pieces if p["finish_reason"]] == ["stop"]
    else:
        choice = (await world.http.post("/v1/completions", json=body)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    await world.until_nothing_is_held()


async def test_a_character_cut_by_max_tokens_is_a_replacement_character(world):
    world.say("ab🌶")
    reply = await world.complete(max_tokens=4)
    assert reply.json()["choices"][0]["text"] == "ab\ufffd"
    events = await world.stream(model="m", prompt="x", max_tokens=4)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "ab\ufffd"


async def test_first_token_may_be_the_last(world):
    world.say("")
    reply = await world.http.post("/v1/chat/completions", json=CHAT)
    [choice] = reply.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    assert reply.json()["usage"]["completion_tokens"] == 1
    events = await world.stream("/v1/chat/completions", **CHAT)
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None, "stop"]
    assert world["decode-0"].requests == []


async def test_several_prompts_and_choices(world, scripts):
    """Index i*n + j; each prompt's choices differ in choice_index alone."""
    prompts = [[1, 2], [3, 4, 5]]
    reply = await world.complete(prompts, n=3, max_tokens=4, ignore_eos=True, seed=7)
    body = reply.json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    expected = [scripts.right_tokens(prompt, 4) for prompt in prompts for _ in range(3)]
    assert [choice["token_ids"] for choice in body["choices"]] == expected
    assert body["usage"]["prompt_tokens"] == 5, "each prompt once"
    assert body["usage"]["completion_tokens"] == 24
    sent = {
        (r.prompt_token_ids, r.choice_index, r.sampling.seed) for r in world["prefill-0"].requests
    }
    assert sent == {(tuple(p), j, 7) for p in prompts for j in range(3)}
    assert len({r.request_id for r in world["prefill-0"].requests}) == 6
    events = await world.stream(
        model="m", prompt=prompts, n=2, max_tokens=4, ignore_eos=True, return_token_ids=True
    )
    tokens, reasons = {}, []
    for event in events[:-1]:
        [choice] = event["choices"]
        tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
        reasons += [choice["index"]] if choice["finish_reason"] else []
    assert [tokens[i] for i in range(4)] == [
        scripts.right_tokens(p, 4) for p in prompts for _ in "ab"
    ]
    assert sorted(reasons) == [0, 1, 2, 3]
    await world.until_nothing_is_held()


async def test_one_failing_choice_ends_its_siblings_but_no_other_request(world, scripts):
    other = asyncio.create_task(world.complete([9, 9], max_tokens=30, ignore_eos=True))

    async def moody(call):
        if call.request.prompt_token_ids == (2, 2):
            call.fail(InternalError("boom"))
        elif call.request.prompt_token_ids == (1, 1):
            await scripts.hang(call)
        else:
            await scripts.honest_prefill(call)

    world["prefill-0"].script = moody
    reply = await world.complete([[1, 1], [2, 2]], max_tokens=5)
    assert_error(reply, 500, "internal_error")
    assert (await other).status_code == 200
    await world.until_nothing_is_held()


async def test_sampling_fields_reach_the_workers(world):
    await world.complete(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-5,
        max_tokens=7,
        stop_token_ids=[3, 4],
        ignore_eos=True,
        cache_salt="tenant",
        typical_p=0.8,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={"65": 5, "7": -1.5},
        bad_words=["no", " way", " "],
        allowed_token_ids=[65, 66],
        min_tokens=2,
        logprobs=3,
        priority=-4,
    )
    [request] = world["prefill-0"].requests
    [last] = world["decode-0"].requests
    assert (
        request.sampling
        == last.sampling
        == SamplingParams(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            seed=-5,
            max_tokens=7,
            stop_token_ids=(3, 4),
            ignore_eos=True,
            typical_p=0.8,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            logit_bias=((65, 5.0), (7, -1.5)),
            bad_words=((A + 13, A + 14), (A + 22, A, A + 24), (SPACE,)),
            allowed_token_ids=(65, 66),
            min_tokens=2,
            logprobs=3,
        )
    )
    assert request.cache_salt == "tenant"
    assert (request.priority, last.priority) == (-4, -4)
    assert request.eos_token_ids == (257,)


async def test_omitted_sampling_fields_mean_openais_defaults(world):
    await world.http.post("/v1/chat/completions", json=CHAT)
    await world.http.post("/v1/chat/completions", json={**CHAT, "top_k": -1})
    first, second = world["prefill-0"].requests
    s = first.sampling
    room = 200 - len(first.prompt_token_ids)
    assert s == SamplingParams(seed=s.seed, max_tokens=room), "a chat may fill the context"
    assert s.seed != second.sampling.seed, "no two requests are alike unless asked"
    assert second.sampling.top_k == 0


async def test_newer_limit_wins_and_generous_ones_are_clamped(world):
    world.say("x" * 300, eos=False)
    body = {**CHAT, "max_tokens": 3, "max_completion_tokens": 5}
    reply = (await world.http.post("/v1/chat/completions", json=body)).json()
    assert reply["usage"]["completion_tokens"] == 5
    reply = (
        await world.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 65535})
    ).json()
    assert reply["usage"]["total_tokens"] == 200
    assert reply["choices"][0]["finish_reason"] == "length"
    reply = (await world.complete(max_tokens=None)).json()
    assert reply["usage"]["completion_tokens"] == 16


async def test_cached_tokens_stay_below_prompt_tokens(world):
    async def all_cached(call):
        call.prefilled(7, num_cached_tokens=3)

    world["prefill-0"].script = all_cached
    usage = (await world.complete([1, 2, 3], max_tokens=1)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


async def test_messages_become_the_templates_prompt(world):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "c"},
    ]
    await world.http.post("/v1/chat/completions", json={"model": "m", "messages": messages})
    prompt = world.tokenizer.decode(world["prefill-0"].requests[0].prompt_token_ids)
    assert prompt == "system: be brief\nuser: ab\nassistant: \nuser: c\nassistant: "


# ---- errors


async def failed_replies(world):
    """Counts by code."""
    text = (await world.http.get("/metrics")).text
    found = re.findall(r'^twostroke_failed_replies_total\{code="(\w+)"\} (\S+)$', text, re.M)
    return {code: float(count) for code, count in found}


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_that_is_too_long_is_400_before_any_200(world, stream):
    text = "x" * 200
    for path, body in (
        ("/v1/completions", {"model": "m", "prompt": text}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": text}]}),
    ):
        reply = await world.http.post(path, json={**body, "stream": stream})
        param = "prompt" if "prompt" in body else "messages"
        error = assert_error(reply, 400, "context_length_exceeded", param)
        assert "200 tokens" in error["message"]
    assert world["prefill-0"].requests == []


async def test_longest_prompt_that_fits_gets_one_token(world):
    reply = await world.complete("x" * 199, max_tokens=10)
    assert reply.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"prompt": []}, "invalid_request", "prompt"),
        ({"prompt": [[]]}, "invalid_request", "prompt"),
        ({"prompt": ["a", ""]}, "invalid_request", "prompt"),
        ({"prompt": [1, 300]}, "invalid_request", "prompt"),
        ({"prompt": [-1]}, "invalid_request", "prompt"),
        ({"prompt": [2**70]}, "invalid_request", "prompt"),
        ({"prompt": ["x"] * 129}, "invalid_request", "prompt"),
        ({"prompt": ["x", "y"], "n": 128}, "invalid_request", "n"),
        ({"stop_token_ids": [300]}, "invalid_request", "stop_token_ids"),
        ({"stop_token_ids": [1] * 129}, "invalid_request", "stop_token_ids"),
        ({"temperature": -0.1}, "invalid_request", "temperature"),
        ({"temperature": 2.1}, "invalid_request", "temperature"),
        ({"top_p": 0}, "invalid_request", "top_p"),
        ({"top_k": -2}, "invalid_request", "top_k"),
        ({"min_p": 1.1}, "invalid_request", "min_p"),
        ({"seed": 2**64}, "invalid_request", "seed"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"max_tokens": -1}, "invalid_request", "max_tokens"),
        ({"logprobs": 21}, "invalid_request", "logprobs"),
        ({"logit_bias": {"191222": -100}}, "invalid_request", "logit_bias"),
        ({"logit_bias": {"300": 1}}, "invalid_request", "logit_bias"),
        ({"allowed_token_ids": [1, 300]}, "invalid_request", "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "invalid_request", "allowed_token_ids"),
        ({"allowed_token_ids": [A], "bad_words": ["a"]}, "invalid_request", "allowed_token_ids"),
        ({"allowed_token_ids": [257], "min_tokens": 1}, "invalid_request", "allowed_token_ids"),
        (
            {"allowed_token_ids": [A, 5], "bad_words": ["a"], "stop_token_ids": [5]}
            | {"min_tokens": 1},
            "invalid_request",
            "allowed_token_ids",
        ),
        ({"typical_p": 0}, "invalid_request", "typical_p"),
        ({"repetition_penalty": 0}, "invalid_request", "repetition_penalty"),
        ({"presence_penalty": 2.1}, "invalid_request", "presence_penalty"),
        ({"frequency_penalty": -2.1}, "invalid_request", "frequency_penalty"),
        ({"min_tokens": 17}, "invalid_request", "min_tokens"),
        ({"min_tokens": -1}, "invalid_request", "min_tokens"),
        ({"bad_words": ["x" * 65]}, "invalid_request", "bad_words"),
        ({"best_of": 129}, "invalid_request", "best_of"),
        ({"prompt": ["x", "y"], "best_of": 65}, "invalid_request", "best_of"),
        ({"prompt_logprobs": 1}, "unsupported_parameter", "prompt_logprobs"),
        ({"guided_regex": "foo**"}, "unsupported_parameter", "guided_regex"),
    ],
)
async def test_bad_parameters_are_400_and_named(world, fields, code, param):
    reply = await world.http.post("/v1/completions", json={"model": "m", "prompt": "x", **fields})
    assert_error(reply, 400, code, param)
    assert world["prefill-0"].requests == []
    assert (await world.http.get("/health")).status_code == 200


async def test_errors_raise_the_openai_clients_classes(world, client, scripts):
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(**{**CHAT, "model": "gpt-9"})
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(**CHAT, temperature=9)
    assert bad.value.param == "temperature"
    world["decode-0"].script = scripts.decode_then(2, scripts.fail(InternalError("boom")))
    stream = await client.chat.completions.create(**CHAT, stream=True)
    with pytest.raises(openai.APIError, match="internal error"):
        async for _ in stream:
            pass


async def test_malformed_json_unknown_routes_and_methods(world):
    http = world.http
    reply = await http.post("/v1/completions", content=b'{"model": "m", "prompt": ')
    assert_error(reply, 400, "invalid_request")
    assert_error(await http.post("/v1/completions", content=b""), 400, "invalid_request")
    assert_error(await http.get("/v1/nothing"), 404, "not_found")
    assert_error(await http.get("/v1/completions/"), 404, "not_found")
    reply = await http.get("/v1/completions")
    assert_error(reply, 405, "method_not_allowed")
    assert "POST" in reply.headers["allow"]
    assert_error(await http.post("/v1/embeddings", json={}), 404, "not_found")
    assert_error(await http.get("/v1/models/gpt-9"), 404, "model_not_found", "model")


def test_every_status_is_in_the_one_table():
    assert http_error(BodyTooLargeError("x")).status == 413


async def test_body_limit_holds_with_and_without_a_length(make_world):
    world = await make_world(max_body_bytes=1000)
    large = json.dumps({"model": "m", "prompt": "x" * 2000}).encode()

    async def in_pieces():
        for start in range(0, len(large), 100):
            yield large[start : start + 100]

    for content in (large, in_pieces()):
        reply = await world.http.post("/v1/completions", content=content)
        assert_error(reply, 413, "body_too_large")
    assert (await world.complete(max_tokens=1)).status_code == 200


async def test_overload_is_refused_before_the_body_is_read(make_world, scripts):
    world = await make_world(max_concurrent_requests=2)
    world["prefill-0"].script = scripts.hang
    busy = [asyncio.create_task(world.complete()) for _ in range(2)]
    await world.until(lambda: len(world["prefill-0"].requests) == 2)

    reader, writer = await asyncio.open_connection("127.0.0.1", world.router.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999\r\n\r\n{")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert b" 429 " in head
    assert b"retry-after: 1" in head
    writer.close()
    await writer.wait_closed()
    reply = await world.complete()
    assert_error(reply, 429, "overloaded")
    assert "x-should-retry" not in reply.headers
    assert (await world.http.get("/health")).status_code == 200
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    await world.until_nothing_is_held()
    world["prefill-0"].script = None
    assert (await world.complete()).status_code == 200


async def test_choices_count_against_the_limit(make_world):
    world = await make_world(max_concurrent_requests=4)
    assert_error(await world.complete(n=5), 429, "overloaded")
    assert (await world.complete(n=4, max_tokens=2)).status_code == 200


async def test_no_workers_is_503_and_health_says_which(make_world):
    world = await make_world(num_decode=0)
    reply = await world.http.get("/health")
    assert reply.status_code == 503
    assert reply.json()["missing"] == ["decode"]
    assert_error(await world.complete(), 503, "worker_unavailable")
    await world.router.set_workers(())
    assert (await world.http.get("/health")).json()["missing"] == ["prefill", "decode"]
    assert_error(await world.complete(), 503, "worker_unavailable")
    assert (await world.http.get("/v1/models")).status_code == 200


async def test_exceptions_nobody_foresaw_become_a_500_with_an_id(world, monkeypatch, caplog):
    def explode(*args, **kwargs):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(world.router.registry, "limits", explode)
    reply = await world.complete()
    error = assert_error(reply, 500, "internal_error")
    assert "secret" not in reply.text
    assert reply.headers["x-request-id"] in error["message"]
    assert "secret detail" in caplog.text
    assert reply.headers["x-request-id"] in caplog.text
    await world.until_nothing_is_held()
    assert await failed_replies(world) == {"internal_error": 1}


async def test_a_bug_in_mid_stream_is_an_error_event(world, scripts, monkeypatch, caplog):
    def explode(self, output):
        raise RuntimeError("secret detail")

    monkeypatch.setattr("router.generate.Stamps.decoded", explode)
    events = await world.stream(model="m", prompt="x", max_tokens=5, ignore_eos=True)
    assert events[-1]["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(events)
    assert "secret detail" in caplog.text
    await world.until_nothing_is_held()
    [life] = (await world.http.get("/debug/requests")).json()["requests"]
    assert life["outcome"] == "internal_error"
    assert await failed_replies(world) == {"internal_error": 1}


async def test_internal_errors_of_workers_stay_inside(world, scripts, caplog):
    world["prefill-0"].script = scripts.fail(InternalError("secret path /srv/x"))
    reply = await world.complete()
    assert_error(reply, 500, "internal_error")
    assert "secret" not in reply.text
    assert "secret path" in caplog.text


async def test_request_ids_are_ours(world):
    replies = [await world.http.get("/v1/models", headers={"x-request-id": "mine"}) for _ in "ab"]
    ids = {reply.headers["x-request-id"] for reply in replies}
    assert len(ids) == 2
    assert "mine" not in ids


@pytest.mark.parametrize(
    ("given", "logged"), [("trace-1.2:3", True), ("x" * 65, False), ('a b="c"', False)]
)
async def test_the_clients_id_is_a_label_in_the_log(world, caplog, given, logged):
    with caplog.at_level(logging.INFO, logger="router.requests"):
        body = {"model": "m", "prompt": "x", "max_tokens": 1}
        await world.http.post("/v1/completions", json=body, headers={"x-request-id": given})
    assert (given in caplog.text) == logged


async def test_debug_is_off_unless_enabled(make_world):
    world = await make_world(enable_debug=False)
    reply = await world.complete(max_tokens=1)
    request_id = reply.headers["x-request-id"]
    for path in ("/debug/requests", f"/debug/requests/{request_id}"):
        assert_error(await world.http.get(path), 404, "not_found")


async def test_debug_shows_running_and_unknown_requests(world, scripts):
    world["decode-0"].script = scripts.decode_then(2, scripts.hang)
    body = {"model": "m", "prompt": [1, 2], "max_tokens": 9, "ignore_eos": True, "stream": True}
    async with world.http.stream("POST", "/v1/completions", json=body) as response:
        life = await world.http.get(f"/debug/requests/{response.headers['x-request-id']}")
        assert life.json()["outcome"] == "running"
        assert life.json()["prefill"]["queue_s"] == 0.001
    assert_error(await world.http.get("/debug/requests/nope"), 404, "not_found")
    await world.until_nothing_is_held()


async def test_cluster_shows_workers_and_load(world):
    world["decode-0"].report(num_running=3, num_free_blocks=250, rss_bytes=42)
    await world.until(lambda: any(s.report for s in world.router.registry.statuses()))
    body = (await world.http.get("/cluster")).json()
    rows = {row["name"]: row for row in body["workers"]}
    assert rows["decode-0"]["kv_usage"] == 0.75
    assert (rows["decode-0"]["num_running"], rows["decode-0"]["rss_bytes"]) == (3, 42)
    assert rows["prefill-0"]["num_running"] is None
    assert rows["prefill-0"]["connected"] is True
    assert body["model"] == "m"


async def test_metrics(world, scripts):
    world["prefill-0"].report(num_free_blocks=7)
    await world.complete(max_tokens=5, ignore_eos=True)
    await world.complete(temperature=9)
    text = (await world.http.get("/metrics")).text
    for line in (
        'twostroke_requests_total{outcome="length"} 1.0',
        "twostroke_generation_tokens_total 5.0",
        "twostroke_prompt_tokens_total 3.0",
        'twostroke_failed_replies_total{code="invalid_request"} 1.0',
        "twostroke_requests_in_flight 0.0",
        "twostroke_ttft_seconds_count 1.0",
        "twostroke_itl_seconds_count 4.0",
        'twostroke_stage_seconds_count{stage="transfer"} 1.0',
    ):
        assert line in text, line
    assert "twostroke_kv_transfer_bytes_total 32.0" in text
    assert 'twostroke_worker_free_blocks{address="' in text


async def test_one_log_line_per_request_without_its_text(world, caplog):
    world.say("an answer")
    with caplog.at_level(logging.INFO, logger="router.requests"):
        await world.complete(prompt="my secret prompt", max_tokens=50)
    [record] = [r for r in caplog.records if r.name == "router.requests"]
    line = record.getMessage()
    for part in (
        "outcome=stop",
        "prompt_tokens=16",
        "output_tokens=10",
        "transfer_ms=3.0",
        "queue_ms=1.0",
        "prefill_worker=prefill-0@one",
        "decode_worker=decode-0@one",
        "attempts=1",
        "ttft_ms=",
    ):
        assert part in line
    assert "secret" not in line
    assert "answer" not in line


# ---- clients that misbehave


async def test_a_client_that_stops_reading_is_cut_off(world, scripts, monkeypatch, caplog):
    monkeypatch.setattr("router.http_exchange.SEND_TIMEOUT_S", 0.3)

    async def flood(call):
        call.pull()
        for _ in range(3000):
            for _ in range(20):
                call.send(65)
            await asyncio.sleep(0)
        await scripts.hang(call)

    world["decode-0"].script = flood
    _, writer = await asyncio.open_connection("127.0.0.1", world.router.port, limit=1)
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 150, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await world.until(lambda: world["decode-0"].requests)
    await world.until(lambda: not world["decode-0"].tasks, within_s=15)
    await world.until_nothing_is_held()
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    assert (await world.http.get("/health")).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_client_that_goes_away_with_a_second_request_waiting(world, scripts):
    """The server tells the last request of a connection only."""
    world["decode-0"].script = scripts.hang
    _, writer = await asyncio.open_connection("127.0.0.1", world.router.port)
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 5, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write((head.encode() + body) * 2)
    await world.until(lambda: world["decode-0"].requests)
    writer.close()
    await writer.wait_closed()
    await world.until_nothing_is_held()


async def test_a_client_that_goes_away_while_it_sends_its_body(world):
    _, writer = await asyncio.open_connection("127.0.0.1", world.router.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await writer.wait_closed()
    await world.until_nothing_is_held()


async def test_a_long_prompt_does_not_stop_other_streams(world, monkeypatch):
    """Tokenization of a big body happens in a thread: the event loop goes on."""

    began, others_are_served = threading.Event(), threading.Event()
    in_time = []

    def slow(self, fields):
        began.set()
        in_time.append(others_are_served.wait(5))
        raise InternalError("enough")

    monkeypatch.setattr("router.prepare.Preparer._encode_prompts", slow)
    task = asyncio.create_task(world.complete(prompt="x" * 20_000))
    await world.until(began.is_set, within_s=10)
    assert (await world.http.get("/health")).status_code == 200
    others_are_served.set()
    assert_error(await task, 500, "internal_error")
    assert in_time == [True]


# ---- shapes


async def replies_of_every_kind(world):
    """(kind, body) of all we can say."""
    http = world.http
    usage = {"stream_options": {"include_usage": True}}
    top = {"logprobs": True, "top_logprobs": 2}
    for chat, text in (
        ({}, {}),
        ({"n": 2}, {"n": 2}),
        ({"max_tokens": 1},) * 2,
        (top, {"logprobs": 2}),
    ):
        yield (
            "chat.completion",
            (await http.post("/v1/chat/completions", json={**CHAT, **chat})).json(),
        )
        yield "text_completion", (await world.complete(**text)).json()
        for event in await world.stream("/v1/chat/completions", **CHAT, **chat, **usage):
            yield "chat.completion.chunk", event
        for event in await world.stream(model="m", prompt="x", **text, **usage):
            yield "text_completion.chunk", event
    for event in await world.stream("/v1/chat/completions", **CHAT):
        yield "chat.completion.chunk", event
    yield "list", (await http.get("/v1/models")).json()
    yield "model", (await http.get("/v1/models/m")).json()
    yield "error", (await http.get("/nothing")).json()
    yield "error", (await world.complete(temperature=9)).json()
    yield "error", (await http.post("/v1/completions", content=b"{")).json()
    await world.router.set_workers(())
    yield "error", (await world.complete()).json()


async def check_all(world, validate):
    world.say(POEM)
    kinds = set()
    async for kind, body in replies_of_every_kind(world):
        if body != "[DONE]":
            validate(kind, body)
            kinds.add(kind)
    assert len(kinds) == 7


async def test_every_reply_has_the_shape_clients_rely_on(world, openai_schemas):
    await check_all(world, openai_schemas)


async def test_every_reply_validates_against_openais_own_schemas(world, official_schemas):
    await check_all(world, official_schemas)


async def test_stream_error_event_has_the_error_shape(world, scripts, openai_schemas):
    world["decode-0"].script = scripts.decode_then(2, scripts.fail(InternalError("boom")))
    events = await world.stream("/v1/chat/completions", **CHAT)
    openai_schemas("error", events[-1])
    assert "[DONE]" not in events
    for event in events[:-1]:
        openai_schemas("chat.completion.chunk", event)


def test_the_schemas_can_fail(openai_schemas):
    good = {"error": {"message": "x", "type": "x", "param": None, "code": None}}
    openai_schemas("error", good)
    for bad in ({}, {"error": "x"}, {"error": {**good["error"], "code": 400}}):
        with pytest.raises(jsonschema.ValidationError):
            openai_schemas("error", bad)


async def test_router_serves_ipv4_on_a_free_port_and_stops_twice(make_world):
    world = await make_world()
    assert world.router.port > 0
    assert world.router.url == f"http://127.0.0.1:{world.router.port}"
    await world.router.stop()
    await world.router.stop()
    with pytest.raises(httpx.ConnectError):
        await world.http.get("/health")


async def test_stop_ends_running_streams_with_an_error(world, scripts):
    world["decode-0"].script = scripts.decode_then(2, scripts.hang)
    body = {"model": "m", "prompt": [1, 2], "max_tokens": 9, "ignore_eos": True}
    task = asyncio.create_task(world.stream(**body))
    await world.until(lambda: world["decode-0"].requests)
    await asyncio.sleep(0.05)
    started = time.perf_counter()
    await world.router.stop()
    events = await task
    assert events[-1]["error"]["code"] == "worker_unavailable"
    assert time.perf_counter() - started < 3


async def test_stop_waits_for_what_it_cut_off(make_world, monkeypatch):
    """A request that outlives the grace period is cancelled; stop returns after its clean-up."""
    steps = []

    async def endless(scope, receive, max_bytes):
        steps.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)
            steps.append("cleaned up")

    monkeypatch.setattr("router.server.SHUTDOWN_S", 0)
    monkeypatch.setattr("router.api.read_body", endless)
    world = await make_world()
    task = asyncio.create_task(world.complete())
    await world.until(lambda: steps)
    await world.router.stop()
    assert steps == ["began", "cleaned up"]
    await asyncio.gather(task, return_exceptions=True)
