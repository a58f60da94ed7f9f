"""Log probabilities, echo and best_of over HTTP: one entry per token, each given once."""

import asyncio
import json
import math

import openai
import pytest

from core.errors import TransferError
from core.request import FinishReason, TokenLogprobs

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
POEM = "né 世🌶!"
PROMPT = [1, 2, 3, 4, 5, 6]


def text_of(piece: bytes) -> str:
    return piece.decode(errors="backslashreplace")


def joined(events):
    """The logprobs object of a whole completion, out of the events of its stream."""
    parts = [e["choices"][0]["logprobs"] for e in events if e != "[DONE]"]
    parts = [part for part in parts if part]
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def streamed_text(events):
    return "".join(e["choices"][0]["text"] for e in events if e != "[DONE]")


async def both(world, **body):
    """The choice of a completion as a whole; its stream must say the same."""
    body = {"model": "m", "max_tokens": 100, **body}
    reply = await world.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    events = await world.stream(**body)
    assert streamed_text(events) == choice["text"]
    assert joined(events) == choice["logprobs"]
    await world.until_nothing_is_held()
    return choice


async def test_a_chats_entries_have_text_and_raw_bytes(world):
    world.say(POEM)
    body = {**CHAT, "logprobs": True, "top_logprobs": 3}
    reply = (await world.http.post("/v1/chat/completions", json=body)).json()
    [choice] = reply["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == reply["usage"]["completion_tokens"], "EOS counts and is reported"
    assert b"".join(bytes(e["bytes"]) for e in entries[:-1]) == POEM.encode()
    assert entries[-1]["token"] == "</s>"
    assert [e["token"] for e in entries[:4]] == ["n", r"\xc3", r"\xa9", " "]
    assert [e["logprob"] for e in entries] == [-i / 64 for i in range(1, len(entries) + 1)]
    for entry in entries:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry["top_logprobs"][1]["bytes"] == entry["bytes"]
    events = await world.stream("/v1/chat/completions", **body)
    streamed = [e["choices"][0]["logprobs"] for e in events[:-1]]
    assert [x for part in streamed if part for x in part["content"]] == entries
    assert streamed[0] is streamed[-1] is None, "neither the role nor the reason is a token"


async def test_without_top_logprobs_a_chat_reports_only_the_tokens_own(world):
    world.say("ab")
    reply = await world.http.post("/v1/chat/completions", json={**CHAT, "logprobs": True})
    entries = reply.json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in entries] == [[], [], []]
    reply = await world.http.post("/v1/chat/completions", json={**CHAT, "logprobs": False})
    assert reply.json()["choices"][0]["logprobs"] is None
    assert world["prefill-0"].requests[-1].sampling.logprobs is None


async def test_a_completions_entries_say_where_their_text_begins(world):
    world.say(POEM)
    choice = await both(world, prompt="x", logprobs=2)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [text_of(bytes([b])) for b in POEM.encode()] + ["</s>"]
    starts = [len(POEM.encode()[:i].decode(errors="ignore")) for i in range(len(POEM.encode()) + 1)]
    assert logprobs["text_offset"] == starts
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == value
        assert len(top) == 2


async def test_the_token_itself_is_always_among_the_top(world):
    """OpenAI: up to logprobs + 1 of them."""
    world.say("ab")
    for count, size in ((0, 1), (1, 2), (2, 2), (5, 5)):
        logprobs = (await both(world, prompt="x", logprobs=count))["logprobs"]
        for token, value, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            assert top[token] == value
            assert len(top) == size


@pytest.mark.parametrize("stop", ["three", ["e t", "two three"]])
async def test_no_entry_comes_after_the_token_that_completes_a_stop_string(world, stop):
    world.say("one two three four!")
    choice = await both(world, prompt="x", logprobs=0, stop=stop)
    tokens = "".join(choice["logprobs"]["tokens"])
    cut = stop if isinstance(stop, str) else "e t"
    assert tokens == choice["text"] + cut
    assert choice["logprobs"]["text_offset"] == list(range(len(tokens)))


async def test_what_a_step_says_after_a_stop_string_is_not_reported(world):
    """A step may bring several tokens."""

    async def speculate(call):
        call.pull()
        tokens = world.tokenizer.encode("b STOP more", add_special_tokens=False)
        logprobs = sum((call.logprobs(t, i + 2) for i, t in enumerate(tokens)), ())
        call.send(*tokens, logprobs=logprobs)
        await asyncio.Event().wait()

    world.say("a")
    world["decode-0"].script = speculate
    body = {"prompt": "x", "logprobs": 0, "stop": "STOP", "return_token_ids": True}
    choice = await both(world, **body)
    assert choice["text"] == "ab "
    assert "".join(choice["logprobs"]["tokens"]) == "ab STOP"
    assert len(choice["token_ids"]) == 7


async def test_min_tokens_holds_against_stop_strings(world):
    world.say("one two one two one")
    for min_tokens, text in (
        (0, "one "),
        (6, "one "),
        (7, "one two one "),
        (19, "one two one two one"),
    ):
        body = {"prompt": "x", "stop": "two", "max_tokens": 100}
        # The script knows no min_tokens; the router's part is the stop string.
        reply = await world.complete(**body, min_tokens=min_tokens)
        assert reply.json()["choices"][0]["text"] == text, min_tokens
        events = await world.stream(model="m", **body, min_tokens=min_tokens)
        assert streamed_text(events) == text


# ---- echo


@pytest.mark.parametrize("prompt", ["Grüße, 世界 🌶 ", "a</s>b"])
async def test_echo_gives_the_prompt_first(world, prompt):
    world.say("out")
    choice = await both_plain(world, prompt=prompt, echo=True)
    assert choice["text"] == prompt + "out"
    prompts = [prompt, "second"]
    reply = await world.complete(prompts, echo=True, n=2)
    assert [c["text"] for c in reply.json()["choices"]] == [
        p + "out" for p in prompts for _ in "ab"
    ]
    assert "" not in reply.json()["choices"][0]["token_ids"]


async def both_plain(world, **body):
    body = {"model": "m", "max_tokens": 100, **body}
    [choice] = (await world.http.post("/v1/completions", json=body)).json()["choices"]
    assert streamed_text(await world.stream(**body)) == choice["text"]
    return choice


async def test_an_echoed_id_prompt_shows_its_special_tokens(world):
    world.say("out")
    tokens = [256, *world.tokenizer.encode("in", add_special_tokens=False), 257]
    choice = await both_plain(world, prompt=tokens, echo=True)
    assert choice["text"] == "<s>in</s>out"


async def test_a_character_begun_in_an_echoed_prompt_is_given_once_and_whole(world):
    ids = world.tokenizer.encode("hot 🌶", add_special_tokens=False)
    byte_of = {i: world.tokenizer.token_bytes(i) for i in ids}
    assert b"".join(byte_of[i] for i in ids[-2:]) == b"\x8c\xb6"

    async def prefill(call):
        call.prefilled(ids[-2])

    async def decode(call):
        call.pull()
        call.decoded(ids[-1], 2)

    world["prefill-0"].script, world["decode-0"].script = prefill, decode
    choice = await both(world, prompt=ids[:-2], echo=True, logprobs=0, max_tokens=2)
    assert choice["text"] == "hot 🌶"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 4, 4, 4]
    assert (await both_plain(world, prompt=ids[:-2], max_tokens=2))["text"] == "🌶"


@pytest.mark.parametrize("prompt", ["né🌶", PROMPT, [9]])
async def test_echo_with_logprobs_reports_the_prompts_tokens_too(world, prompt):
    """text_offset counts the emitted text, the echo included."""
    world.say("out")
    choice = await both(world, prompt=prompt, echo=True, logprobs=1)
    logprobs = choice["logprobs"]
    ids = (
        world.tokenizer.encode(prompt, add_special_tokens=True)
        if isinstance(prompt, str)
        else prompt
    )
    num_echoed = len(choice["text"]) - len("out")
    assert len(logprobs["tokens"]) == len(ids) + 4
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(ids)] == [
        -(1000 + i) / 64 for i in range(1, len(ids))
    ]
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"][len(ids) :] == [num_echoed + i for i in range(4)]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    [first, *_] = world["prefill-0"].requests
    assert (first.sampling.logprobs, first.sampling.prompt_logprobs) == (1, 1)


async def test_stop_strings_are_looked_for_in_the_output_only(world):
    world.say("b c")
    choice = await both_plain(world, prompt="a c a", echo=True, stop=["ab", "c"])
    assert choice["text"] == "a c ab "


# ---- best_of


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_best_of_gives_the_likeliest_answers(world, logprobs):
    """Choice 2 is the likeliest on average, then 0; choice 3 has the highest sum."""

    async def prefill(call):
        index = call.request.choice_index
        mean, length = [(-2.0, 3), (-3.0, 3), (-1.0, 4), (-2.5, 1)][index]
        token = 40 + index
        entry = TokenLogprobs(token_id=token, logprob=mean)
        call.send(*[token] * length, logprobs=(entry,) * length, finish_reason=FinishReason.STOP)

    world["prefill-0"].script = prefill
    reply = await world.complete([[1], [2]], n=2, best_of=4, logprobs=logprobs, echo=True)
    body = reply.json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert [c["token_ids"] for c in body["choices"]] == [[42] * 4, [40] * 3] * 2
    assert [c["logprobs"] is None for c in body["choices"]] == [logprobs is None] * 4
    assert body["usage"]["completion_tokens"] == 22, "all that were generated"
    assert body["usage"]["prompt_tokens"] == 2
    assert len(world["prefill-0"].requests) == 8
    await world.until_nothing_is_held()


# ---- recovery


async def test_entries_of_earlier_attempts_are_given_once(make_world, scripts):
    """A dead worker loses no entry and doubles none."""
    world = await make_world(num_decode=3)
    clean = await world.complete(PROMPT, max_tokens=30, ignore_eos=True, logprobs=3, echo=True)
    world["decode-0"].script = scripts.decode_then(7, scripts.die)
    world["decode-1"].script = scripts.decode_then(3, scripts.fail(TransferError("cut")))
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "logprobs": 3}
    for _ in range(3):
        events = await world.stream(**body, echo=True)
        assert joined(events) == clean.json()["choices"][0]["logprobs"]
    assert any(request.attempt for request in world["prefill-0"].requests)
    await world.until_nothing_is_held()


async def test_a_prompts_entries_are_asked_for_until_they_have_come(make_world, scripts):
    world = await make_world(num_prefill=2)
    for worker in world.prefill:
        worker.scripts = [scripts.fail(TransferError("cut"))]
    choice = await both(world, prompt=PROMPT, echo=True, logprobs=0, max_tokens=3, ignore_eos=True)
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT) + 3


@pytest.mark.parametrize("echo", [False, True])
async def test_a_worker_that_leaves_entries_out_is_not_believed(world, echo, caplog):
    async def silent(call):
        call.send(7, logprobs=call.logprobs(7, 1) if echo else (), finish_reason=FinishReason.STOP)

    world["prefill-0"].script = silent
    reply = await world.complete(PROMPT, logprobs=1, echo=echo)
    assert reply.status_code == 500
    assert "log probabilities came for" in caplog.text
    await world.until_nothing_is_held()


async def test_impossible_tokens_have_a_number_that_json_can_say(world):
    async def never(call):
        entry = TokenLogprobs(token_id=7, logprob=-math.inf, top=((8, 0.0), (7, -math.inf)))
        call.send(7, logprobs=(entry,), finish_reason=FinishReason.STOP)

    world["prefill-0"].script = never
    logprobs = (await both(world, prompt="x", logprobs=2))["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]
    assert sorted(logprobs["top_logprobs"][0].values()) == [-9999.0, 0.0]
    reply = await world.http.post("/v1/chat/completions", json={**CHAT, "logprobs": True})
    assert json.loads(reply.text)["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


async def test_openai_client_reads_logprobs_and_sends_logit_bias(world):
    world.say("ok")
    async with openai.AsyncOpenAI(base_url=f"{world.router.url}/v1", api_key="unused") as client:
        chat = await client.chat.completions.create(
            **CHAT, logprobs=True, top_logprobs=1, logit_bias={"65": -100}
        )
        text = await client.completions.create(model="m", prompt="x", logprobs=1, echo=True)
        stream = await client.completions.create(model="m", prompt="x", logprobs=1, stream=True)
        streamed = [e async for e in stream]
    content = chat.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["o", "k", "</s>"]
    assert content[0].bytes == [ord("o")]
    assert len(content[0].top_logprobs) == 1
    assert world["prefill-0"].requests[0].sampling.logit_bias == ((65, -100.0),)
    assert text.choices[0].logprobs.tokens == ["x", "o", "k", "</s>"]
    parts = [event.choices[0].logprobs for event in streamed]
    assert [token for part in parts if part for token in part.tokens] == ["o", "k", "</s>"]
    assert text.choices[0].logprobs.text_offset == [0, 1, 2, 3]
