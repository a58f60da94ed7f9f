"""Streamed text adds up to the whole text, for any split, any bytes and any stop strings."""

import time

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from core.errors import InvalidRequestError, ModelLoadError
from router.text_stream import TextStream, TokenBytes, read_rules

SCRIPTS = "aeA zé\u0301ßжЖאבعرहिन्दीไทย你好日本語한국어𝔘𝕏🙂👩‍👩‍👧‍👦🏳️‍🌈🌶️\u200d\ufeff\ufffd\n\t\r  "
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁the", "▁Hi", "s", "▁▁", "é", "한", "🙂", "<0xZZ>", "ab", "c", "d", "<|", "|>", "."]
SPECIAL = ["<s>", "</s>"]


def sentencepiece_like() -> tokenizers.Tokenizer:
    tokens = [*SPECIAL, *BYTES, *WORDS]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[])
    )
    backend.add_special_tokens(SPECIAL)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def byte_level(*added: AddedToken) -> tokenizers.Tokenizer:
    """256 tokens of one byte each: token id = the byte."""
    alphabet = {byte: chr(byte) for byte in range(256)}
    moved = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    alphabet |= {byte: chr(0x100 + i) for i, byte in enumerate(moved)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={c: byte for byte, c in alphabet.items()}, merges=[])
    )
    backend.add_tokens(list(added))
    backend.decoder = decoders.ByteLevel()
    return backend


SPM = TokenBytes(sentencepiece_like())
SPM_HIDDEN = frozenset(range(len(SPECIAL)))
ONE_BYTE = TokenBytes(byte_level())

texts = st.text(st.sampled_from(SCRIPTS) | st.characters(codec="utf-8"), max_size=40)
stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def cut(text: str, stop: list[str]) -> str:
    starts = [text.find(s) for s in stop if s in text]
    return text[: min(starts)] if starts else text


def split(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    """`token_ids` in runs of the given sizes, the sizes used round and round."""
    runs, start = [], 0
    while start < len(token_ids):
        size = sizes[len(runs) % len(sizes)]
        runs.append(token_ids[start : start + size])
        start += size
    return runs


def run(stream: TextStream, runs: list[list[int]]) -> str:
    pieces = [stream.push(token_ids) for token_ids in runs]
    pieces.append(stream.finish())
    return "".join(pieces)


sizes_of_runs = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(texts, sizes_of_runs)
@example("👩‍👩‍👧‍👦", [1])
@example("안녕하세요", [2])
def test_every_text_survives_any_split_of_its_bytes(text, sizes):
    stream = TextStream(ONE_BYTE)
    assert run(stream, split(list(text.encode()), sizes)) == text
    assert not stream.stopped


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=30), sizes_of_runs)
def test_bytes_that_are_no_text_decode_as_the_tokenizers_library_decodes_them(data, sizes):
    expected = byte_level().decode(data)
    assert expected == bytes(data).decode("utf-8", "replace")
    assert run(TextStream(ONE_BYTE), split(data, sizes)) == expected


@settings(max_examples=500, deadline=None)
@given(texts | st.text("abc", max_size=30), stops, sizes_of_runs)
@example("xabcd", ["bc", "abcd"], [1])
@example("xabce", ["bc", "abcd"], [1])
@example("xabc", ["bc", "abcd"], [3])
@example("aaab", ["aab"], [1])
def test_text_ends_before_the_stop_string_that_begins_first(text, stop, sizes):
    stream = TextStream(ONE_BYTE, stop=stop)
    assert run(stream, split(list(text.encode()), sizes)) == cut(text, stop)
    assert stream.stopped == any(s in text for s in stop)
    assert (stream.matched_stop is None) != stream.stopped


@settings(max_examples=500, deadline=None)
@given(st.text("ab", max_size=30), stops, sizes_of_runs, st.integers(0, 31))
@example("abab", ["ab"], [1], 2)
@example("aab", ["aa", "aab"], [3], 2)
def test_no_stop_string_ends_the_text_before_min_tokens(text, stop, sizes, min_tokens):
    """It may begin before, but a later token must complete it."""
    starts = [
        start
        for start in range(len(text))
        for s in stop
        if text.startswith(s, start) and start + len(s) > min_tokens
    ]
    stream = TextStream(ONE_BYTE, stop=stop, min_tokens=min_tokens)
    assert run(stream, split(list(text.encode()), sizes)) == text[: min(starts, default=None)]
    assert stream.stopped == bool(starts)


@settings(max_examples=300, deadline=None)
@given(texts, stops)
def test_the_stream_knows_where_each_tokens_text_begins(text, stop):
    """What is held back for a stop string or an unfinished character included."""
    stream = TextStream(ONE_BYTE, stop=stop)
    data = text.encode()
    for i, byte in enumerate(data):
        assert stream.num_chars == len(data[:i].decode(errors="ignore"))
        stream.push([byte])
        if stream.stopped:
            break


@settings(max_examples=300, deadline=None)
@given(texts, st.data())
def test_stop_strings_of_any_script(text, data):
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = [text[start : start + data.draw(st.integers(1, 5))] or "x", "🙂"]
    stream = TextStream(ONE_BYTE, stop=stop)
    assert run(stream, [[byte] for byte in text.encode()]) == cut(text, stop)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, SPM.size - 1), max_size=25), stops, sizes_of_runs)
def test_byte_fallback_tokens_mix_with_words(token_ids, stop, sizes):
    raw = b"".join(SPM[i] for i in token_ids if i not in SPM_HIDDEN)
    whole = raw.removeprefix(b" ").decode("utf-8", "replace")
    stream = TextStream(SPM, hidden=SPM_HIDDEN, stop=stop)
    assert run(stream, split(token_ids, sizes)) == cut(whole, stop)


@settings(max_examples=200, deadline=None)
@given(texts)
def test_byte_fallback_of_valid_text_agrees_with_the_tokenizers_library(text):
    token_ids = [len(SPECIAL) + byte for byte in text.encode()]
    expected = sentencepiece_like().decode(token_ids)
    assert run(TextStream(SPM, hidden=SPM_HIDDEN), [[i] for i in token_ids]) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=6), st.sampled_from(["always", "first", "never"]))
def test_metaspace_agrees_with_the_tokenizers_library(token_ids, scheme):
    tokens = ["▁", "▁a", "b▁", "</s>"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[])
    )
    backend.add_special_tokens(["</s>"])
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    got = run(TextStream(TokenBytes(backend), hidden={3}), [[i] for i in token_ids])
    assert got == backend.decode(token_ids)


def test_nothing_is_sent_that_must_be_taken_back():
    stream = TextStream(ONE_BYTE, stop=["\n<|x|>", "Observation"])
    sent = [stream.push([byte]) for byte in b"ok\nObserver: \nObs"]
    assert "".join(sent) == "ok\nObserver: \n"
    assert sent[2] == "", "a newline may begin the first stop string"
    assert sent[3] == "\n", "and is given back when it does not"
    assert stream.finish() == "Obs"
    assert not stream.stopped


def test_nothing_comes_after_a_stop_string():
    stream = TextStream(ONE_BYTE, stop=["END"])
    assert stream.push(list(b"text END more")) == "text "
    assert stream.stopped
    assert stream.matched_stop == "END"
    assert stream.push(list(b"again")) == ""
    assert stream.finish() == ""


def test_an_unfinished_character_becomes_one_replacement_at_the_end():
    stream = TextStream(ONE_BYTE)
    assert stream.push(list("hot 🌶".encode()[:-1])) == "hot "
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
    assert stream.push([65]) == ""


def test_a_replacement_character_can_be_part_of_a_stop_string():
    stream = TextStream(ONE_BYTE, stop=["a\ufffd"])
    assert stream.push(list(b"xa\xf0\x9f")) == "x"
    assert stream.finish() == ""
    assert stream.stopped


def test_output_completes_the_character_that_the_prompt_began():
    chili = list("🌶".encode())
    prompt = [*b"hot ", *chili[:2]]
    stream = TextStream(ONE_BYTE, prompt_token_ids=prompt)
    assert [stream.push([byte]) for byte in chili[2:]] == ["", "🌶"]
    other = TextStream(ONE_BYTE, prompt_token_ids=prompt)
    assert other.push(list(b"A")) == "A", "the prompt's broken end is no new text"


def test_a_continuation_keeps_the_space_of_its_first_word():
    the = len(SPECIAL) + len(BYTES) + WORDS.index("▁the")
    assert TextStream(SPM).push([the, the]) == "the the"
    assert TextStream(SPM, prompt_token_ids=[the]).push([the]) == " the"


def test_hidden_and_unknown_ids_give_no_text():
    stream = TextStream(ONE_BYTE, hidden={ord("x")})
    assert stream.push([ord("a"), ord("x"), 256, 10**6, -1, ord("b")]) == "ab"


def test_added_tokens_of_a_byte_level_vocabulary_are_literal_text():
    pieces = TokenBytes(byte_level(AddedToken("Ġé 你", normalized=False)))
    assert TextStream(pieces).push([256]) == "Ġé 你"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidRequestError) as caught:
        TextStream(ONE_BYTE, stop=["x", ""])
    assert caught.value.param == "stop"


@pytest.mark.parametrize(
    "decoder", [None, decoders.BPEDecoder(), decoders.CTC(), decoders.Strip(" ", 0, 1)]
)
def test_decoders_that_are_not_known_are_refused(decoder):
    with pytest.raises(ModelLoadError, match="decoder"):
        read_rules(decoder)


def test_the_cost_of_a_token_does_not_grow_with_the_text():
    """Ten times the text takes about ten times as long; decoding anew would take a hundred."""

    def seconds(num_tokens: int) -> float:
        stream = TextStream(ONE_BYTE, stop=["aaab", "b" * 50])
        start = time.process_time()
        for _ in range(num_tokens):
            stream.push([97])
        return time.process_time() - start

    short = min(seconds(4_000) for _ in range(3))
    assert min(seconds(40_000) for _ in range(2)) < 30 * short
