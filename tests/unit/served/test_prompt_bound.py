"""The least number of tokens of a text: never more than the tokenizer makes of it."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from core.gguf_file import read_gguf
from router.gguf_vocab import build_backend
from router.prompt_bound import PromptBound


def byte_level(*words, normalizer=None, lacks="", **added):
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {*lacks})
    vocab = {c: i for i, c in enumerate([*alphabet, *words])}
    merges = [(word[:-1], word[-1]) for word in words]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer:
        backend.normalizer = normalizer
    backend.add_tokens([AddedToken("<special>", special=True, normalized=False, **added)])
    return backend


def sentencepiece():
    vocab = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}, "▁": 257, "▁▁": 258}
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "▁")], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return backend


KINDS = {
    "bytes": byte_level("ab", "abc", "abcd"),
    "nfc": byte_level("ab", normalizer=normalizers.NFC()),
    "greedy spaces": byte_level("ab", lstrip=True, rstrip=True),
    "no token for some bytes": byte_level("ab", lacks="ñĄ"),
    "sentencepiece": sentencepiece(),
}
PIECES = [
    "abcd",
    "a",
    " " * 50,
    "<special>",
    "▁",
    "\x04",
    "\U00050000",
    "é",
    "世",
    "ι\u0308\u0301",
    "\u1fbe\u0308\u0301",
]


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_has_fewer_tokens(kind):
    backend, rng = KINDS[kind], random.Random(3)
    bound = PromptBound.read(backend.to_str())
    texts = [piece * 200 for piece in PIECES]
    texts += ["".join(rng.choices(PIECES, k=rng.randrange(30))) for _ in range(300)]
    for text in texts:
        num_tokens = len(backend.encode(text).ids)
        assert 0 <= bound.min_tokens(text) <= num_tokens, text
    assert bound.min_tokens("世" * 9000) > 500, "a bound, not a shrug"


def test_the_longest_token_sets_the_bound_even_if_special():
    assert PromptBound.read(byte_level("ab").to_str()).bytes_per_token == len("<special>")
    assert PromptBound.read(sentencepiece().to_str()).bytes_per_token == len("▁▁".encode())


def change(rules, *path, to):
    for name in path[:-1]:
        rules = rules[name]
    rules[path[-1]] = to


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "type"), "WordPiece"),
        (("normalizer",), {"type": "Strip"}),
        (("normalizer",), {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}),
        (("normalizer",), {"type": "Replace", "pattern": {"String": "ab"}, "content": ""}),
        (("pre_tokenizer",), {"type": "Whitespace"}),
        (("pre_tokenizer",), {"type": "Split", "behavior": "Removed", "pattern": {}}),
        (("pre_tokenizer",), None),
    ],
)
def test_rules_that_may_lose_text_have_no_bound(path, value):
    rules = json.loads(byte_level().to_str())
    assert PromptBound.read(json.dumps(rules)).min_tokens("x" * 999) > 0
    change(rules, *path, to=value)
    assert PromptBound.read(json.dumps(rules)).min_tokens("x" * 999) == 0


def test_the_default_model_has_a_bound(smollm2_path):
    gguf = read_gguf(Path(smollm2_path))
    backend = build_backend(gguf)
    gguf.data.close()
    bound = PromptBound.read(backend.to_str())
    longest = " " * 50 + "#" * 80
    assert 0 < bound.min_tokens(longest * 100) <= len(backend.encode(longest * 100).ids)
    assert bound.min_tokens("\x04" * 1000) == len(backend.encode("\x04" * 1000).ids) == 0


def test_a_normalizer_beside_lost_bytes_leaves_no_bound():
    kept = byte_level(normalizer=normalizers.NFC(), lacks="ÿ")
    lost = byte_level(normalizer=normalizers.NFC(), lacks="K")
    assert PromptBound.read(kept.to_str()).min_tokens("x" * 999) > 0
    assert PromptBound.read(lost.to_str()).min_tokens("x" * 999) == 0
    assert lost.encode("\u212a" * 999).ids == [], "the sign of kelvin becomes a K"
