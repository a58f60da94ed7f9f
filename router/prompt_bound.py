"""How many tokens a text has at least, from its size alone: a hopeless prompt is refused unread.

Exact, never a guess: what a tokenizer drops or swallows is not counted, and one with rules unknown
here gets no bound. Knows the
format of tokenizer.json and nothing of requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from router.text_stream import byte_alphabet

_NFC_SHRINKS = 4
"""NFC text has at least a quarter of the bytes it was made from (the worst is U+0390: 7 to 2)."""
_NORMALIZERS = frozenset({"Sequence", "Prepend", "Replace", "NFC"})
_PRE_TOKENIZERS = frozenset({"Sequence", "Split", "ByteLevel", "Digits", "Metaspace"})
_LETTERS = {chr(letter): byte for letter, byte in byte_alphabet().items()}
_NEVER_IN_TEXT = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
"""No UTF-8 has these bytes; few vocabularies name them."""
_ALL_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBound:
    bytes_per_token: int | None
    """No token stands for more bytes of text than this. None: not known."""
    lost_bytes: bytes
    """Without a token in this model: its tokenizer drops them (SmolLM2: control characters)."""
    swallows_spaces: bool
    """Some added tokens take any number of spaces beside them, so spaces do not count."""

    @classmethod
    def read(cls, tokenizer_json: str) -> Self:
        rules = json.loads(tokenizer_json)
        added = rules["added_tokens"]
        return cls(
            bytes_per_token=_longest_token(rules) if _keeps_all_text(rules) else None,
            lost_bytes=bytes(sorted(_lost_bytes(rules))),
            swallows_spaces=any(token["lstrip"] or token["rstrip"] for token in added),
        )

    def min_tokens(self, text: str) -> int:
        if self.bytes_per_token is None:
            return 0
        counted = "".join(text.split()) if self.swallows_spaces else text
        # A lone surrogate is for the tokenizer to refuse.
        data = counted.encode(errors="surrogatepass").translate(None, self.lost_bytes)
        return -(-len(data) // self.bytes_per_token)


def _keeps_all_text(rules: Mapping[str, Any]) -> bool:
    """Whether every byte that is not lost ends in some token, and no token takes any number."""
    model = rules["model"]
    if model["type"] != "BPE" or rules["truncation"]:
        return False
    if _byte_level(rules):  # a normalizer might make lost bytes out of others
        complete = not rules["normalizer"] or _lost_bytes(rules) <= _NEVER_IN_TEXT
    else:
        complete = model["byte_fallback"] and model["vocab"].keys() >= _ALL_BYTES
    return (
        complete
        and all(_harmless_normalizer(rule) for rule in _rules(rules["normalizer"], "normalizers"))
        and all(
            rule["type"] in _PRE_TOKENIZERS and rule.get("behavior") != "Removed"
            for rule in _rules(rules["pre_tokenizer"], "pretokenizers")
        )
    )


def _longest_token(rules: Mapping[str, Any]) -> int:
    """In bytes of the text it was made from. A byte-level token has one letter for each byte."""
    added = {token["content"] for token in rules["added_tokens"]}
    plain = rules["model"]["vocab"].keys() - added
    measure = len if _byte_level(rules) else _num_bytes
    longest = max([*map(measure, plain), *map(_num_bytes, added)], default=1)
    kinds = {rule["type"] for rule in _rules(rules["normalizer"], "normalizers")}
    return max(1, longest) * (_NFC_SHRINKS if "NFC" in kinds else 1)


def _lost_bytes(rules: Mapping[str, Any]) -> set[int]:
    if not _byte_level(rules):
        return set()
    return {_LETTERS[letter] for letter in _LETTERS.keys() - rules["model"]["vocab"].keys()}


def _num_bytes(token: str) -> int:
    return len(token.encode(errors="surrogatepass"))


def _byte_level(rules: Mapping[str, Any]) -> bool:
    return "ByteLevel" in {rule["type"] for rule in _rules(rules["pre_tokenizer"], "pretokenizers")}


def _harmless_normalizer(rule: Mapping[str, Any]) -> bool:
    """It may lengthen text; of those that shorten it only NFC, which is accounted for."""
    if rule["type"] == "Replace":
        old = rule["pattern"].get("String", "")
        return bool(old) and len(old.encode()) <= len(rule["content"].encode())
    return rule["type"] in _NORMALIZERS


def _rules(rule: Mapping[str, Any] | None, children: str) -> Iterator[Mapping[str, Any]]:
    if rule is not None:
        yield rule
        for child in rule.get(children, ()):
            yield from _rules(child, children)
