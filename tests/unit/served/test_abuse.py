"""Clients that send too much, too slowly or too often: refused early, and nobody else notices."""

import asyncio
import json
import threading

import pytest

from router.http_exchange import MAX_HEADER_BYTES

LONG = "x" * 100_000


async def talk(port, *pieces):
    """The head and body of the one answer to `pieces`; the server must close after it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        answer = await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


def pieces_of(data, size=30_000):
    return [data[i : i + size] for i in range(0, len(data), size)]


GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
MANY = b"".join(b"x-%d: %s\r\n" % (i, b"a" * 1000) for i in range(70))


@pytest.mark.parametrize(
    "pieces",
    [
        pieces_of(GET + MANY),
        [GET + MANY + b"\r\n"],
        pieces_of(GET + b"x: " + b"a" * 97_000),
        pieces_of(b"GET /" + b"a" * (MAX_HEADER_BYTES + 1)),
        pieces_of(CHUNKED + b"1\r\n{\r\n0\r\n" + MANY),
    ],
    ids=["many", "at once", "one without an end", "url", "trailers"],
)
async def test_headers_are_bounded(make_world, pieces):
    world = await make_world()
    if pieces[0].startswith(b"POST"):  # its request is under way: cut off without a word
        assert await talk(world.router.port, *pieces) == (b"", b"")
    else:
        head, body = await talk(world.router.port, *pieces)
        assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b"connection: close" in head
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "headers_too_large"
    await world.until_nothing_is_held()


async def test_what_is_no_http_gets_an_error_of_the_usual_shape(world):
    head, body = await talk(world.router.port, b"HELLO\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_request"


async def test_each_request_of_a_connection_has_room_for_its_own_headers(world):
    for _ in range(3):
        reply = await world.http.get("/health", headers={"x-long": "a" * 50_000})
        assert reply.status_code == 200
        reply = await world.complete(prompt=LONG, max_tokens=1)
        assert reply.status_code == 400, "the body is no header"


async def send_half(world):
    reader, writer = await asyncio.open_connection("127.0.0.1", world.router.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999\r\n\r\n{")
    await writer.drain()
    return reader, writer


async def test_slow_bodies_hold_no_places_and_have_a_limit_of_their_own(make_world):
    world = await make_world(max_concurrent_requests=2)
    slow = [await send_half(world) for _ in range(7)]
    await asyncio.sleep(0.1)
    assert (await world.complete(max_tokens=2)).status_code == 200
    slow.append(await send_half(world))
    await asyncio.sleep(0.1)
    assert (await world.complete(max_tokens=2)).status_code == 429
    for _, writer in slow:
        writer.close()
    await asyncio.sleep(0.1)
    assert (await world.complete(max_tokens=2)).status_code == 200
    await world.until_nothing_is_held()


async def test_a_body_that_comes_when_the_server_is_full_is_not_parsed(make_world, scripts):
    world = await make_world(max_concurrent_requests=1)
    world["prefill-0"].script = scripts.hang
    reader, writer = await send_half(world)
    await asyncio.sleep(0.1)
    busy = asyncio.create_task(world.complete())
    await world.until(lambda: world["prefill-0"].requests)
    writer.write(b"x" * 998)  # no JSON: 400 if it were parsed
    assert b" 429 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    writer.close()
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    await world.until_nothing_is_held()


@pytest.mark.parametrize("chat", [False, True])
async def test_a_hopeless_prompt_is_not_tokenized(world, monkeypatch, chat):
    encoded = []
    encode = type(world.tokenizer).encode
    monkeypatch.setattr(
        "router.tokenizer.Tokenizer.encode",
        lambda self, text, **flags: encoded.append(text) or encode(self, text, **flags),
    )
    message = {"role": "user", "content": LONG}
    fields = {"messages": [message]} if chat else {"prompt": ["short", LONG]}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    reply = await world.http.post(path, json={"model": "m", **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert reply.json()["error"]["param"] == ("messages" if chat else "prompt")
    assert not encoded


async def test_long_preparations_at_once_are_few(world, monkeypatch):
    running, most, go = [], [], threading.Event()

    def slow(self, fields):
        running.append(1)
        most.append(len(running))
        assert go.wait(10)
        running.pop()
        return [[1, 2]]

    monkeypatch.setattr("router.prepare.Preparer._encode_prompts", slow)
    tasks = [asyncio.create_task(world.complete(LONG, max_tokens=1)) for _ in range(8)]
    await world.until(lambda: len(running) >= 4)
    await asyncio.sleep(0.2)
    assert len(running) == 4
    go.set()
    assert [reply.status_code for reply in await asyncio.gather(*tasks)] == [200] * 8
    assert max(most) == 4


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
async def test_head_is_answered_without_a_body(world, path):
    reply = await world.http.head(path)
    assert (reply.status_code, reply.content) == (200, b"")


async def test_events_hold_no_line_ends_of_unicode(world):
    text = "a\x85b\u2028c\u2029d\\"
    world.say(text)
    body = {"model": "m", "prompt": "x", "max_tokens": 50}
    events = await world.stream(**body)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text
