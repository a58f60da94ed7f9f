"""Inputs that broke other engines, over HTTP against real workers with a tiny model.

Each test bears the number of its case. Greedy tokens are forced by falling biases, each token being
pushed out of the way by the repetition penalty once it was taken.
"""

import asyncio
import json
import shutil

import pytest
import pytest_asyncio

from router.tokenizer import load_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = 257
CHILI = "🌶"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def merging_model(tiny_model, tmp_path_factory):
    """The tiny model with a few tokens of several bytes, after the 256 bytes and two specials."""
    folder = tmp_path_factory.mktemp("merging")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    file = folder / "tokenizer.json"
    rules = json.loads(file.read_text())
    rules["added_tokens"] = rules["added_tokens"][:2]
    merges = [("æ", "ĺ"), ("æĺ", "¯"), ("Ġ", "t"), ("h", "a"), ("ha", "t"), ("Ġt", "hat")]
    rules["model"]["merges"] = [list(merge) for merge in merges]
    vocab = rules["model"]["vocab"]
    vocab |= {"<s>": 256, "</s>": 257} | {a + b: 258 + i for i, (a, b) in enumerate(merges)}
    file.write_text(json.dumps(rules))
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer(merging_model):
    return load_tokenizer(merging_model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(cluster_of, merging_model):
    async with cluster_of(merging_model) as running:
        yield running


@pytest.fixture
def ids(tokenizer):
    """Token ids of a text, one per byte unless a longer token fits."""
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture
def forced(ids):
    """Fields that make `text` (or token ids) the output. No token may occur twice or in the
    prompt."""

    def fields(text):
        tokens = ids(text) if isinstance(text, str) else text
        assert len(set(tokens)) == len(tokens)
        return {
            "temperature": 0,
            "max_tokens": len(tokens),
            "allowed_token_ids": tokens,
            "logit_bias": {str(t): 100 - 90 * i / len(tokens) for i, t in enumerate(tokens)},
            "repetition_penalty": 100,
        }

    return fields


async def post(cluster, path=TEXT, *, status=200, **body):
    reply = await cluster.http.post(path, json={"model": "m", **body})
    assert reply.status_code == status, reply.text
    return reply.json()


async def complete(cluster, prompt, **fields):
    return (await post(cluster, prompt=prompt, **fields))["choices"][0]


async def deltas(cluster, prompt, **fields):
    """What a stream's events say, one choice each."""
    body = {"model": "m", "prompt": prompt, "stream": True, **fields}
    reply = await cluster.http.post(TEXT, json=body)
    assert reply.status_code == 200, reply.text
    events = [line[6:] for line in reply.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events]


async def texts(cluster, prompt, **fields):
    return [delta["text"] for delta in await deltas(cluster, prompt, **fields)]


async def refused(cluster, param, path=TEXT, **fields):
    """400 naming the field, and the server lives."""
    body = {"prompt": PROMPT} if path == TEXT else {"messages": [{"role": "user", "content": "x"}]}
    error = (await post(cluster, path, status=400, **{**body, **fields}))["error"]
    assert error["param"] == param, error
    assert (await cluster.http.get("/health")).status_code == 200
    return error["message"]


# ---- streaming text


async def test_a01_a_prompt_that_ends_in_mid_character_is_not_repeated(cluster, ids, forced):
    chili = ids(CHILI)
    fields = forced(chili[2:])
    prompt = [*ids("hot "), *chili[:2]]
    sent = await texts(cluster, prompt, **fields)
    assert "".join(sent) == CHILI
    assert "".join(await texts(cluster, prompt, echo=True, **fields)) == "hot " + CHILI


async def test_a03_each_entry_has_the_raw_bytes_of_its_piece(cluster, forced):
    messages = [{"role": "user", "content": "Reply with a single emoji"}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2, **forced(CHILI)}
    [choice] = (await post(cluster, CHAT, **body))["choices"]
    assert choice["message"]["content"] == CHILI
    entries = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in CHILI.encode()]
    for entry in entries:
        for token in (entry, *entry["top_logprobs"]):
            assert "\ufffd" not in token["token"]
            assert token["bytes"] != [239, 191, 189]


async def test_a05_tokens_are_text_and_not_the_vocabularys_alphabet(
    cluster, tokenizer, ids, forced
):
    tokens = [*ids("是"), *ids(" that")]
    assert tokens == [259, 263], "two tokens of several bytes"
    choice = await complete(cluster, "这", echo=True, logprobs=0, **forced(tokens))
    assert choice["text"] == "这是 that"
    assert choice["logprobs"]["tokens"] == [r"\xe8", r"\xbf", r"\x99", "是", " that"]
    body = {"messages": [{"role": "user", "content": "这"}], "logprobs": True, **forced(tokens)}
    [choice] = (await post(cluster, CHAT, **body))["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["是", " that"]
    assert bytes(choice["logprobs"]["content"][0]["bytes"]).decode() == "是"


async def test_a07_text_offset_counts_the_emitted_text(cluster, forced):
    prompt = "no 是 that "
    fields = {"echo": True, "logprobs": 3, **forced("Quick\nFVz")}
    parts = await deltas(cluster, prompt, **fields)
    assert len(parts) > 5
    text = "".join(part["text"] for part in parts)
    assert text == prompt + "Quick\nFVz"
    entries = [
        pair
        for part in parts
        for pair in zip(part["logprobs"]["tokens"], part["logprobs"]["text_offset"], strict=True)
    ]
    assert all(text.startswith(token, offset) for token, offset in entries)
    assert "".join(token for token, _ in entries) == text
    whole = await complete(cluster, prompt, **fields)
    assert whole["logprobs"]["text_offset"] == [offset for _, offset in entries]


# ---- stop strings


async def test_a09_no_part_of_a_stop_string_is_sent(cluster, forced):
    fields = {"stop": ["Observation"]}
    assert "".join(await texts(cluster, PROMPT, **fields, **forced("K Observation"))) == "K "
    sent = await texts(cluster, PROMPT, **fields, **forced("K Obsert"))
    assert sent[:2] == ["K", " "]
    assert "".join(sent) == "K Obsert", "what did not become one is given back"


@pytest.mark.parametrize(
    ("stop", "text", "sent"),
    [
        (["\n", "Alice:"], " Alice!", " Alice!"),
        (["\n", "Alice:"], " Alice:", " "),
        (["\n", "Alice:"], " Alice\n", " Alice"),
        (["?!"], "Who is?", "Who is?"),
        (["O-P Q"], "xO-P Qy", "x"),
        (["User:\n", "Assistant:\n"], "a bUser:\n", "a b"),
    ],
)
async def test_a11_text_is_sent_once_and_whole(cluster, forced, stop, text, sent):
    fields = {"stop": stop, **forced(text)}
    parts = await deltas(cluster, "7+7", **fields)
    assert "".join(part["text"] for part in parts) == sent
    assert parts[-1]["finish_reason"] == ("length" if text == sent else "stop")
    assert (await complete(cluster, "7+7", **fields))["text"] == sent


async def test_a11_stop_strings_in_what_the_model_says_by_itself(cluster, ids):
    prompt = "Alice: Hi, Bob!\nBob: Hi,"
    fields = {"temperature": 0, "max_tokens": 40, "allowed_token_ids": ids(" OPQAbc\n:")}
    fields["frequency_penalty"] = 2.0
    text = (await complete(cluster, prompt, **fields))["text"]
    assert len(set(text)) > 5
    for start in range(0, 35, 5):
        stop = [text[start : start + 3], text[start + 4 : start + 7]]
        cut = min(text.find(s) for s in stop)
        assert "".join(await texts(cluster, prompt, stop=stop, **fields)) == text[:cut]


async def test_a13_what_may_begin_a_stop_string_is_given_back_when_it_does_not(cluster, forced):
    sent = await texts(cluster, PROMPT, stop="\n<|x|>", **forced("a\nbc"))
    assert sent[:2] == ["a", "\nb"]
    assert "".join(sent) == "a\nbc"


# ---- sampling


async def test_a15_a_seed_decides_and_each_choice_has_its_own(cluster):
    fields = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}

    async def answers(path, **more):
        body = {**fields, **more}
        body |= (
            {"prompt": PROMPT} if path == TEXT else {"messages": [{"role": "user", "content": "x"}]}
        )
        choices = (await post(cluster, path, return_token_ids=True, **body))["choices"]
        return [tuple(choice["token_ids"]) for choice in choices]

    for path in (TEXT, CHAT):
        three = await answers(path, seed=7, n=3)
        assert len(set(three)) == 3
        assert await answers(path, seed=7, n=3) == three
        assert await answers(path, seed=7) == three[:1]
        assert await answers(path, seed=8) != three[:1]
        assert await answers(path) != await answers(path)


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"191222": -100}},
        {"logit_bias": {"300": -100}},
        {"logit_bias": {str(i): -100 for i in range(200_000)}},
        {"stop_token_ids": [151645], "min_tokens": 2},
        {"stop_token_ids": [-1]},
        {"allowed_token_ids": [300]},
        {"allowed_token_ids": [5, -1]},
    ],
    ids=lambda fields: f"{next(iter(fields))} {len(str(fields))}",
)
async def test_a16_ids_beyond_the_vocabulary_are_refused(cluster, path, fields):
    await refused(cluster, next(iter(fields)), path, **fields, max_tokens=4)


async def test_a16_extreme_biases_leave_the_neighbours_alone(cluster):
    fields = {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    alone = await complete(cluster, PROMPT, **fields)
    others = [
        {"logit_bias": {str(i): -100 for i in range(264)}},
        {"logit_bias": {"263": 100}, "min_tokens": 20, "stop_token_ids": [263]},
        {"repetition_penalty": 100, "presence_penalty": 2, "frequency_penalty": -2},
    ]
    *_, beside = await asyncio.gather(
        *(complete(cluster, PROMPT, **{**fields, **other}) for other in others),
        complete(cluster, PROMPT, **fields),
    )
    assert beside["token_ids"] == alone["token_ids"]


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [64, 65], "bad_words": ["a", "b"]},
        {"allowed_token_ids": [EOS], "min_tokens": 3},
        {
            "allowed_token_ids": [64, 65],
            "bad_words": ["a"],
            "stop_token_ids": [65],
            "min_tokens": 1,
        },
    ],
)
async def test_a17_a_request_that_leaves_no_token_is_refused(cluster, fields):
    await refused(cluster, "allowed_token_ids", **fields)


async def test_a17_a_request_that_runs_out_of_tokens_ends_with_a_defined_error(cluster, ids):
    """After one "a" nothing is allowed any more: never token 0."""
    fields = {"allowed_token_ids": ids("a"), "bad_words": ["aa"], "max_tokens": 5}
    error = (await post(cluster, prompt=PROMPT, status=400, **fields))["error"]
    assert error["code"] == "invalid_request"
    assert "bar every token" in error["message"]
    body = {"model": "m", "prompt": PROMPT, "stream": True, **fields}
    reply = await cluster.http.post(TEXT, json=body)
    first, last = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line]
    assert first["choices"][0]["text"] == "a"
    assert last["error"] == error | {"message": last["error"]["message"]}
    assert (await cluster.http.get("/health")).status_code == 200


async def test_a19_repetition_counts_the_prompt_and_the_other_penalties_the_output(cluster, ids):
    [paris] = ids("P")
    prompt = [paris] * 12
    pushed = {"temperature": 0, "logit_bias": {str(paris): 12}, "return_token_ids": True}

    async def tokens(count=1, **fields):
        choice = await complete(cluster, prompt, max_tokens=count, **pushed, **fields)
        return choice["token_ids"]

    assert await tokens() == [paris]
    assert await tokens(presence_penalty=2, frequency_penalty=2) == [paris]
    assert await tokens(repetition_penalty=100) != [paris]
    by_count = await tokens(16, frequency_penalty=2)
    assert by_count[:2] == [paris, paris]
    assert by_count != [paris] * 16, "each one in the output makes the next less likely"
    assert await tokens(16, presence_penalty=2) == [paris] * 16, "counted once"


async def test_a19_penalties_change_no_log_probability(cluster):
    """They are the model's own, before any penalty or bias."""
    plain = await complete(cluster, PROMPT, max_tokens=1, temperature=0, logprobs=5)
    bent = await complete(
        cluster,
        PROMPT,
        max_tokens=1,
        temperature=0,
        logprobs=5,
        logit_bias={"70": 100},
        repetition_penalty=1.5,
        presence_penalty=1,
    )
    top, bent_top = plain["logprobs"]["top_logprobs"][0], bent["logprobs"]["top_logprobs"][0]
    assert bent["logprobs"]["tokens"] == ["g"]
    assert {token: bent_top[token] for token in top} == pytest.approx(top, abs=1e-4)
    assert bent_top["g"] < min(top.values())


# ---- validation


async def test_a21_null_means_the_default_and_the_context_length_is_told_right(cluster, ids):
    body = {"prompt": PROMPT, "ignore_eos": True, "max_tokens": None}
    assert (await post(cluster, **body))["usage"]["completion_tokens"] == 16
    nulls = ("logit_bias", "min_tokens", "logprobs", "bad_words", "best_of", "priority", "echo")
    await post(cluster, prompt=PROMPT, max_tokens=2, **dict.fromkeys(nulls))
    choice = await complete(
        cluster, [1] * 8, max_tokens=2045, logit_bias={str(EOS): 100}, temperature=0
    )
    assert choice["finish_reason"] == "stop", "more than the context has left is clamped"
    message = await refused(cluster, "prompt", prompt=[1] * 2048, max_tokens=1)
    assert "maximum context length is 2048 tokens" in message
    sent = await texts(cluster, "echo me ", echo=True, max_tokens=3, ignore_eos=True)
    assert "".join(sent).startswith("echo me ")


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a23_a_prompt_too_long_is_400_in_a_stream_too(cluster, path):
    long = "x" * 5000
    fields = {"prompt": long} if path == TEXT else {"messages": [{"role": "user", "content": long}]}
    await refused(cluster, next(iter(fields)), path, stream=True, **fields)


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a25_guided_decoding_is_refused_by_name(cluster, path):
    for field in ("guided_regex", "guided_grammar", "guided_json", "structured_outputs"):
        await refused(cluster, field, path, **{field: "foo**"})
    await refused(cluster, "response_format", path, response_format={"type": "json_object"})


# ---- beyond the cases


async def test_log_probabilities_of_a_prompt_equal_those_of_the_same_tokens_generated(cluster):
    """Prefill and decode, cached blocks or none, must agree."""
    prompt = [(7 * i) % 250 for i in range(50)]
    fields = {"temperature": 0, "ignore_eos": True, "logprobs": 4, "return_token_ids": True}
    fields["allowed_token_ids"] = list(range(264))  # the model knows more than the tokenizer
    said = await complete(cluster, prompt, max_tokens=40, **fields)
    read = await complete(cluster, prompt + said["token_ids"], max_tokens=1, echo=True, **fields)
    assert len(read["logprobs"]["tokens"]) == 91
    assert read["logprobs"]["tokens"][50:90] == said["logprobs"]["tokens"]
    for name in ("token_logprobs", "top_logprobs"):
        pairs = zip(read["logprobs"][name][50:90], said["logprobs"][name], strict=True)
        for a, b in pairs:
            assert a == pytest.approx(b, abs=1e-3)


async def test_min_tokens_holds_off_eos_stop_tokens_and_stop_strings(cluster, ids):
    fields = {"temperature": 0, "max_tokens": 9, "return_token_ids": True}
    [q] = ids("Q")
    for bias, ending in (
        (EOS, {}),
        (q, {"stop_token_ids": [q]}),
        (q, {"stop": "Q"}),
    ):
        body = {**fields, **ending, "logit_bias": {str(bias): 100}}
        assert len((await complete(cluster, PROMPT, **body))["token_ids"]) == 1
        choice = await complete(cluster, PROMPT, min_tokens=5, **body)
        assert len(choice["token_ids"]) == 6
        assert choice["finish_reason"] == "stop"


async def test_bad_words_never_appear(cluster, ids):
    fields = {"temperature": 0, "max_tokens": 30, "allowed_token_ids": ids("abc ")}
    free = (await complete(cluster, PROMPT, **fields))["text"]
    words = [free[:1], free[3:5]]
    barred = (await complete(cluster, PROMPT, bad_words=words, **fields))["text"]
    assert len(barred) == 30
    assert not any(word in barred for word in words)
