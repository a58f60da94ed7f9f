"""Token ids to text as they come: whole characters only, cut before the first stop string.

Every token stands for bytes (`TokenBytes`), so text is decoded by joining bytes and never by
decoding all tokens again: the work per token is constant, and the pieces a stream gives add up to
exactly the text of all its tokens, however they were split. Bytes that are no UTF-8 become U+FFFD
as in Python's "replace" (one per maximal broken part), also where Hugging Face's ByteFallback would
drop the good characters around them.

Knows neither HTTP nor templates; `router/tokenizer.py` makes the streams.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from core.errors import InvalidRequestError, ModelLoadError

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
MAX_CHAR_BYTES = 4


def byte_alphabet() -> dict[int, int]:
    """Code point of a byte-level vocabulary's character -> the byte it stands for.

    GPT-2's rule: printable Latin-1 stands for itself, the 68 others are moved up from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(moved)}


_BYTE_OF = byte_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRules:
    """How a vocabulary writes text, read off the tokenizer's decoder."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    dropped_at_start: str = ""
    """Metaspace: this character is dropped from the first token instead of being a space."""
    num_stripped: int = 0
    """Spaces taken off the start of the whole text (the dummy prefix of SentencePiece)."""

    def to_bytes(self, token: str) -> bytes:
        if self.byte_fallback and (byte := _fallback_byte(token)) is not None:
            return bytes((byte,))
        if self.byte_level:
            try:
                return bytes([_BYTE_OF[ord(char)] for char in token])
            except KeyError:
                return token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


def _fallback_byte(token: str) -> int | None:
    """0x41 for the token "<0x41>"."""
    if len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def read_rules(decoder: object) -> DecodingRules:
    """Rules of a `tokenizers` decoder. Raises ModelLoadError for kinds no decoder-only LLM uses."""
    if decoder is None:
        raise ModelLoadError("the tokenizer has no decoder")
    state: Any = decoder.__getstate__()  # its JSON, as in tokenizer.json
    fields: dict[str, Any] = {"replacements": ()}
    fused = False
    for step in _flatten(json.loads(state)):
        kind = step["type"]
        if kind == "ByteLevel":
            fields["byte_level"] = True
        elif kind == "ByteFallback":
            fields["byte_fallback"] = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Metaspace":
            fields |= _metaspace(step)
        elif kind == "Replace" and "String" in step["pattern"] and not fused:
            fields["replacements"] += ((step["pattern"]["String"], step["content"]),)
        elif kind == "Strip" and fused and step["content"] == " " and step["stop"] == 0:
            fields["num_stripped"] = int(step["start"])
        else:
            raise ModelLoadError(f"the tokenizer's decoder {json.dumps(step)} is not supported")
    return DecodingRules(**fields)


def _flatten(step: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if step["type"] != "Sequence":
        return (step,)
    return [leaf for child in step["decoders"] for leaf in _flatten(child)]


def _metaspace(step: Mapping[str, Any]) -> dict[str, Any]:
    mark = step["replacement"]
    prepends = step.get("prepend_scheme", "always") != "never"
    return {"replacements": ((mark, " "),), "dropped_at_start": mark if prepends else ""}


class TokenBytes:
    """The bytes each token id stands for, worked out on first use. Safe to share by threads."""

    def __init__(self, backend: Backend) -> None:
        self.rules = read_rules(backend.decoder)
        self._id_to_token = backend.id_to_token
        self._size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._added = {
            token_id: token.content
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        self._known: dict[int, bytes] = {}

    @property
    def size(self) -> int:
        """One more than the highest token id."""
        return self._size

    def __getitem__(self, token_id: int) -> bytes:
        """Empty for an id that names no token (models pad their vocabulary)."""
        piece = self._known.get(token_id)
        if piece is None and 0 <= token_id < self._size:
            piece = self._known[token_id] = self._look_up(token_id)
        return piece or b""

    def at_start(self, token_id: int) -> bytes:
        """The bytes of a token that begins the text."""
        piece, mark = self[token_id], self.rules.dropped_at_start
        if not mark or token_id in self._added:
            return piece
        token = self._id_to_token(token_id) or ""
        return self.rules.to_bytes(token.replace(mark, ""))

    def _look_up(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None and self.rules.byte_level:
            return added.encode()  # stored as plain text, not in the byte alphabet
        token = self._id_to_token(token_id)
        return b"" if token is None else self.rules.to_bytes(token)


class _StopString:
    """One stop string matched character by character (Knuth, Morris, Pratt 1977)."""

    __slots__ = ("_borders", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        """Length of the longest end of the text so far that begins this stop string."""
        self._borders = [0]
        for char in text[1:]:
            self._borders.append(self._longer(self._borders[-1], char))

    def push(self, char: str) -> bool:
        """True when `char` completes the stop string."""
        self.num_matched = self._longer(self.num_matched, char)
        if self.num_matched < len(self.text):
            return False
        self.num_matched = self._borders[-1]
        return True

    def _longer(self, length: int, char: str) -> int:
        while length and self.text[length] != char:
            length = self._borders[length - 1]
        return length + 1 if self.text[length] == char else 0


class _StopFilter:
    """Lets text through up to the stop string that begins first; holds back what may become one.

    "First" is by where the match begins, so the result does not depend on how the text arrives:
    with stops "bc" and "abcd" the text "abc" waits for one more character.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise InvalidRequestError("a stop string must not be empty", param="stop")
        self._stops = [_StopString(text) for text in dict.fromkeys(stop)]
        self._held = ""
        self._match_start: int | None = None
        """Where in the held text the earliest complete match begins, while an earlier may come."""
        self.matched: str | None = None
        self.stopped = False

    def push(self, text: str, *, armed: bool = True) -> str:
        """Not `armed`: a stop string that ends within `text` is text like any other."""
        if not self._stops:
            return text
        held, num_scanned = self._held + text, len(self._held)
        for end in range(num_scanned + 1, len(held) + 1):
            self._scan(held[end - 1], end, armed)
            if self._decided(end):
                return self._stop(held)
        safe = len(held) - max(stop.num_matched for stop in self._stops)
        self._held = held[safe:]
        if self._match_start is not None:
            self._match_start -= safe
        return held[:safe]

    def finish(self) -> str:
        if self._match_start is not None:
            return self._stop(self._held)
        held, self._held = self._held, ""
        return held

    def _scan(self, char: str, end: int, armed: bool) -> None:
        for stop in self._stops:
            if stop.push(char) and armed:
                start = end - len(stop.text)
                if self._match_start is None or start < self._match_start:
                    self._match_start, self.matched = start, stop.text

    def _decided(self, end: int) -> bool:
        first = self._match_start
        return first is not None and all(end - stop.num_matched >= first for stop in self._stops)

    def _stop(self, held: str) -> str:
        self.stopped, self._held = True, ""
        return held[: self._match_start]


class TextStream:
    """Text of one choice. Everything `push` and `finish` return adds up to its whole text."""

    def __init__(
        self,
        pieces: TokenBytes,
        *,
        hidden: Collection[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """`hidden` token ids give no text. A stop string counts when a token after the first
        `min_tokens` completes it. `prompt_token_ids`: the text continues theirs, so its first word
        keeps its space and a character that the prompt left unfinished is completed."""
        self._pieces = pieces
        self._hidden = hidden
        self._stop = _StopFilter(stop)
        self._num_unarmed = min_tokens
        """Tokens still to come that no stop string may end with."""
        self.num_chars = 0
        """Of the text so far, with what is held back: where the next token's text begins."""
        self._utf8 = _Utf8Decoder("replace")
        self._unfinished = b"".join(pieces[i] for i in prompt_token_ids[-MAX_CHAR_BYTES:])
        self._at_start = not prompt_token_ids
        self._num_to_strip = pieces.rules.num_stripped if self._at_start else 0
        self._finished = False

    @property
    def stopped(self) -> bool:
        """A stop string was met: the text ended before it and nothing more comes."""
        return self._stop.stopped

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.matched if self._stop.stopped else None

    def push(self, token_ids: Sequence[int]) -> str:
        """New text that is safe to send; maybe empty."""
        if self.stopped or self._finished:
            return ""
        if not self._num_unarmed:
            return self._stop.push(self._decode(token_ids))
        early, late = token_ids[: self._num_unarmed], token_ids[self._num_unarmed :]
        self._num_unarmed -= len(early)
        text = self._stop.push(self._decode(early), armed=False) if early else ""
        return text + self._stop.push(self._decode(late)) if late else text

    def finish(self) -> str:
        """The held rest, once no more tokens come. A character cut short becomes U+FFFD."""
        if self.stopped or self._finished:
            return ""
        self._finished = True
        rest = self._stop.push(self._utf8.decode(b"", final=True), armed=not self._num_unarmed)
        return rest if self.stopped else rest + self._stop.finish()

    def _decode(self, token_ids: Sequence[int]) -> str:
        data = b"".join(self._piece(i) for i in token_ids if i not in self._hidden)
        if self._num_to_strip and data:
            data = self._strip(data)
        if self._unfinished and data:
            self._continue_char(data[0])
        text = self._utf8.decode(data)
        self.num_chars += len(text)
        return text

    def _piece(self, token_id: int) -> bytes:
        piece = self._pieces[token_id]
        if self._at_start and piece:
            self._at_start = False
            return self._pieces.at_start(token_id)
        return piece

    def _strip(self, data: bytes) -> bytes:
        stripped = data.lstrip(b" ")
        num_spaces = min(len(data) - len(stripped), self._num_to_strip)
        self._num_to_strip = 0 if stripped else self._num_to_strip - num_spaces
        return data[num_spaces:]

    def _continue_char(self, byte: int) -> None:
        """Put the prompt's last bytes before a continuation byte; what they say is not new text."""
        if byte & 0xC0 == 0x80:
            self._utf8.decode(self._unfinished)
        self._unfinished = b""
