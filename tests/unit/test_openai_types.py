"""Honest parameters: honoured, harmless, off, or refused by name. Never dropped in silence."""

from __future__ import annotations

import json
import time

import pytest

from core.errors import InvalidRequestError, UnsupportedParameterError
from router.openai_types import (
    IGNORED,
    OFF_VALUES,
    ChatFields,
    CompletionFields,
    parse_body,
)

COMPLETION = {"model": "m", "prompt": "x"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def completion(**fields):
    return parse_body(CompletionFields, json.dumps({**COMPLETION, **fields}).encode())


def chat(**fields):
    return parse_body(ChatFields, json.dumps({**CHAT, **fields}).encode())


def message(**fields):
    return chat(messages=[fields])


@pytest.mark.parametrize("prompt", ["", "x", ["a", "b"], [1, 2], [[1], [2, 3]], []])
def test_prompt_forms(prompt):
    assert completion(prompt=prompt).prompt == prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, 2.5]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [[1], [None]]}, "prompt[1][0]"),
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": [1]}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"seed": 1.0}, "seed"),
        ({"top_k": "3"}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": True}, "n"),
        ({"stop": 3}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"odd": 1}}, "stream_options.odd"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"frequency_penalty": False}, "frequency_penalty"),
        ({"min_tokens": 1.0}, "min_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"best_of": True}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"priority": 2**31}, "priority"),
        ({"bad_words": "no"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, "2"]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": [1] * 65_537}, "allowed_token_ids"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"01": 1}}, "logit_bias"),
        ({"logit_bias": {"1.0": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 100.5}}, "logit_bias"),
        ({"logit_bias": {"1": "5"}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ],
)
def test_wrong_completion_fields_are_named(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        completion(**fields)
    assert caught.value.param == param
    assert param.split("[")[0].split(".")[-1] in caught.value.message


@pytest.mark.parametrize("kind", [CompletionFields, ChatFields])
def test_missing_fields_are_named(kind):
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(kind, b"{}")
    assert caught.value.param in ("model", "prompt", "messages")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"prompt": "x"}, "prompt"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 1}, "best_of"),
    ],
)
def test_wrong_chat_fields_are_named(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "USER", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": "x", "name": "bob"}, "messages[0].name"),
        ({"role": "user", "content": "x", "odd": 1}, "messages[0].odd"),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            "messages[0].tool_calls",
        ),
    ],
)
def test_wrong_messages_are_named(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        message(**fields)
    assert caught.value.param == param


def test_messages_as_clients_write_them():
    fields = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": []},
            {"role": "assistant", "content": "c", "name": None},
        ]
    )
    assert [m.text for m in fields.messages] == ["be brief", "ab", "", "c"]


@pytest.mark.parametrize("name", sorted(OFF_VALUES))
def test_known_but_unbuilt_parameters_may_only_be_off(name):
    completion(**{name: None})
    chat(**{name: None})
    for off in OFF_VALUES[name]:
        completion(**{name: off})
    for value in (0.5, 3, True, "on", ["x"], {"a": 1}):
        with pytest.raises(UnsupportedParameterError) as caught:
            completion(**{name: value})
        assert caught.value.param == name


def test_off_values_are_typed():
    completion(store=False)
    for fields in ({"store": 0}, {"suffix": False}, {"prompt_logprobs": 0}):
        with pytest.raises(UnsupportedParameterError):
            completion(**fields)


def test_what_log_probabilities_are_asked_for():
    assert completion().num_logprobs is None
    assert completion(logprobs=0).num_logprobs == 0
    assert completion(logprobs=20).num_logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).num_logprobs is None
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).num_logprobs == 20


def test_best_of_defaults_to_n():
    assert completion().num_generated == 1
    assert completion(n=3).num_generated == 3
    assert completion(n=2, best_of=5).num_generated == 5
    assert completion(n=2, best_of=2, stream=True).num_generated == 2, "nothing to choose from"


def test_logit_bias_is_read_into_pairs():
    assert completion(logit_bias={"50256": -100, "0": 0.5}).logit_bias == (
        (50256, -100.0),
        (0, 0.5),
    )
    assert completion(logit_bias={}).logit_bias == ()
    assert chat(logit_bias=None).logit_bias is None


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_labels_are_accepted(name):
    completion(**{name: "anything"})
    chat(**{name: {"a": "b"}})


@pytest.mark.parametrize(
    "name", ["guided_xml", "chat_template", "use_beam_search", "x" * 10_000, ""]
)
def test_unknown_parameters_are_refused_by_name(name):
    for kind in (completion, chat):
        with pytest.raises(UnsupportedParameterError) as caught:
            kind(**{name: None})
        assert caught.value.param == name[:64]


def test_no_field_is_both_honoured_and_ignored():
    for kind in (CompletionFields, ChatFields):
        assert not set(kind.model_fields) & (IGNORED | set(OFF_VALUES))
    assert not IGNORED & set(OFF_VALUES)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model":' * 5000,
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": "x", "temperature": NaN}',
        b'{"model": "m", "prompt": "x", "temperature": Infinity}',
        b'{"model": "m", "prompt": "x", "temperature": 1e999}',
        b'{"model": "m", "prompt": "x",}',
    ],
)
def test_bodies_that_are_no_request(body):
    with pytest.raises(InvalidRequestError):
        parse_body(CompletionFields, body)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "prompt": [1.5] * 500_000},
        {"model": "m", "prompt": [[1.5] * 500] * 1000},
        {"model": "m", "prompt": "x", "stop": [1] * 500_000},
        {"model": "m", "prompt": "x", "stop_token_ids": ["1"] * 500_000},
        {"model": "m", "prompt": "x", "allowed_token_ids": [1] * 500_000},
        {"model": "m", "prompt": "x", "bad_words": [1] * 500_000},
        {"model": "m", "prompt": "x", "logit_bias": {str(i): 1 for i in range(200_000)}},
        {"model": "m", "prompt": "x", "logit_bias": {f"x{i}": "1" for i in range(200_000)}},
    ],
)
def test_a_million_faults_cost_no_more_than_one(body):
    data = json.dumps(body).encode()
    started = time.perf_counter()
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(CompletionFields, data)
    assert time.perf_counter() - started < 2
    assert len(caught.value.message) < 500
