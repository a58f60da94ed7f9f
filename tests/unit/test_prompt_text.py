"""What a tokenizer says of a prompt's text, and what it makes of words that are not wanted."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, processors

from router.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    return load_tokenizer(smollm2_path)


@pytest.fixture
def adds_bos(tmp_path):
    """SentencePiece-like: a BOS before and a space mark at the start of every text."""
    tokens = ["<s>", "▁", "a", "b", "▁a", "▁ab", "<0xC3>", "<0xA9>"]
    merges = [("▁", "a"), ("▁a", "b")]
    backend = Backend(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, byte_fallback=True)
    )
    backend.add_special_tokens(["<s>"])
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("text", ["Hello there, world", "naïve 世界 🌶", "<|im_start|>user\nhi", ""])
def test_a_prompts_tokens_begin_where_its_text_says(smollm2, text):
    ids = smollm2.encode(text, add_special_tokens=True)
    shown, offsets = smollm2.read_prompt(ids, text)
    assert shown == text
    assert smollm2.read_prompt(ids, None) == (text, offsets)
    pieces = [smollm2.token_bytes(i) for i in ids]
    starts = [b"".join(pieces[:i]).decode(errors="ignore") for i in range(len(ids))]
    assert offsets == [len(start) for start in starts]


def test_an_added_bos_has_no_text_and_a_written_one_has(adds_bos):
    ids = adds_bos.encode("ab é", add_special_tokens=True)
    assert adds_bos.read_prompt(ids, "ab é") == ("ab é", [0, 0, 2, 3, 3])
    assert adds_bos.read_prompt(ids, None)[0].startswith("<s>")
    written = adds_bos.encode("<s>ab", add_special_tokens=True)
    assert written.count(0) == 1
    assert adds_bos.read_prompt(written, "<s>ab")[0] == "<s>ab"


def test_bad_words_are_barred_in_mid_sentence_and_at_its_start(smollm2):
    """Of SmolLM2's tokens "that" and " that" are two, and neither ends in the other."""
    plain, spaced = (tuple(smollm2.encode(t, add_special_tokens=False)) for t in ("that", " that"))
    assert len(plain) == len(spaced) == 1
    assert smollm2.encode_bad_words(["that"]) == (plain, spaced)
    assert smollm2.encode_bad_words([" that", "that"]) == (plain, spaced), "a space says nothing"
    assert smollm2.encode_bad_words([]) == ()


def test_a_bad_word_of_spaces_alone_is_itself(smollm2):
    [newline, *_] = smollm2.encode_bad_words(["\n"])
    assert smollm2.decode(newline) == "\n"


def test_a_sequence_that_ends_in_a_shorter_one_is_left_out(byte_tokenizer_path):
    tokenizer = load_tokenizer(byte_tokenizer_path)
    ids = tuple(tokenizer.encode("ab", add_special_tokens=False))
    assert tokenizer.encode_bad_words(["ab"]) == (ids,)
