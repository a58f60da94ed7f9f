"""Text to token ids and back for one model, from a GGUF file or a Hugging Face folder.

Owns the rules that models get wrong elsewhere: special tokens in text are parsed, BOS stands at the
start once and never twice, EOS ids are gathered from every place that names them. The fast work is
done by the `tokenizers` library; transformers is not needed. Knows no HTTP and no workers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from core.errors import InvalidRequestError, ModelLoadError
from core.gguf_file import GGUFFile, read_gguf
from core.model_files import gguf_eos_token_ids, load_model_config
from router.chat_template import ChatMessage, ChatTemplate
from router.gguf_vocab import build_backend
from router.text_stream import TextStream, TokenBytes

logger = logging.getLogger(__name__)

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
"""Ends of an assistant's turn. Old GGUF files name only the end of text; there, one of these also
ends generation when the file's own chat template writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelTokens:
    """What a model says of its special tokens, apart from the vocabulary itself."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate
    num_embeddings: int | None
    """Rows of the embedding table, where known."""


class Tokenizer:
    """Immutable after construction; every method may be called from any thread."""

    def __init__(self, backend: Backend, tokens: _ModelTokens) -> None:
        self._backend = backend
        self._pieces = TokenBytes(backend)
        self._chat_template = tokens.chat_template
        self.bos_token_id = tokens.bos_token_id
        self.eos_token_ids = tokens.eos_token_ids
        sizes = (self._pieces.size, tokens.num_embeddings or self._pieces.size)
        self.vocab_size = min(sizes)
        """Ids from 0 to here are known both to the tokenizer and to the model."""
        added = backend.get_added_tokens_decoder().items()
        self._hidden = frozenset(i for i, token in added if token.special) | {*self.eos_token_ids}
        self._adds_bos = self.bos_token_id is not None and (
            backend.encode("", add_special_tokens=True).ids[:1] == [self.bos_token_id]
        )

    def to_json(self) -> str:
        """Its rules and vocabulary in the format of tokenizer.json."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens written in it count as such.

        With `add_special_tokens` the model's BOS (and EOS, where its tokenizer adds one) goes
        around them, except for a BOS with which the text begins already.
        Raises InvalidRequestError for text that has no token ids in this model.
        """
        try:
            # Alone of its kind this method leaves the interpreter to other threads meanwhile, so
            # that a long prompt in one stops no stream; "fast": it does not count characters.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except TypeError:  # lone surrogates are no Unicode text, though Python's str can hold them
            raise InvalidRequestError("the text is not valid Unicode") from None
        ids: list[int] = encoding.ids
        if max(ids, default=0) >= self.vocab_size:
            raise InvalidRequestError("the text holds a special token that this model lacks")
        if add_special_tokens and self._adds_bos and ids[1:2] == [self.bos_token_id]:
            del ids[0]
        return ids

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt text, ready for the assistant's turn. Raises InvalidRequestError."""
        return self._chat_template.render(messages)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of the rendered chat. The template writes the special tokens; only a BOS that
        the model expects and the template left out is added."""
        ids = self.encode(self.render_chat(messages), add_special_tokens=False)
        if self._adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of all `token_ids` at once: what a stream of them adds up to."""
        stream = TextStream(self._pieces, hidden=self._hidden if skip_special_tokens else ())
        return stream.push(token_ids) + stream.finish()

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word with and without a space before it, as in vLLM; of two of which
        one ends in the other, the shorter one bars both."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip() or word
            plain, spaced = (
                tuple(self.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}")
            )
            found[plain] = None
            if spaced[-len(plain) :] != plain:
                found[spaced] = None
        return tuple(found)

    def read_prompt(self, token_ids: Sequence[int], text: str | None) -> tuple[str, list[int]]:
        """A prompt's text and where in it each token begins.

        `text`: what it was encoded from. None: special tokens are shown, and a character that the
        prompt leaves unfinished is not, it belongs to the text that goes on from there.
        """
        stream = TextStream(self._pieces, hidden=() if text is None else self._added_bos(text))
        offsets, decoded = [], ""
        for token_id in token_ids:
            offsets.append(stream.num_chars)
            decoded += stream.push((token_id,))
        shown = decoded if text is None else text
        return shown, [min(offset, len(shown)) for offset in offsets]

    def _added_bos(self, text: str) -> tuple[int, ...]:
        """The BOS that stands before a prompt although its text does not begin with it."""
        bos = self.bos_token_id
        if bos is None or text.encode().startswith(self._pieces[bos]):
            return ()
        return (bos,)

    def stream(
        self,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
    ) -> TextStream:
        """A new stream of output text, cut before the first of the `stop` strings that a token
        after the first `min_tokens` completes.

        Give `prompt_token_ids` when the output continues that text (a completion): then the first
        word keeps its space. Raises InvalidRequestError for an empty stop string.
        """
        return TextStream(
            self._pieces,
            hidden=self._hidden,
            stop=stop,
            min_tokens=min_tokens,
            prompt_token_ids=prompt_token_ids,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token, maybe only a part of a character."""
        return self._pieces[token_id]


def load_tokenizer(model_path: str) -> Tokenizer:
    """The tokenizer of a GGUF file or of a folder with tokenizer.json.

    Raises ModelLoadError with one line that says what is missing or unknown.
    """
    path = Path(model_path)
    if path.is_file():
        return _from_gguf(read_gguf(path))
    if (path / "tokenizer.json").is_file():
        return _from_folder(path)
    if path.is_dir():
        raise ModelLoadError(f"{path}: no tokenizer.json in this folder")
    raise ModelLoadError(f"{path}: no such model file or folder")


def _from_gguf(gguf: GGUFFile) -> Tokenizer:
    backend = build_backend(gguf)
    bos = gguf.integer("tokenizer.ggml.bos_token_id", -1)
    eos = gguf_eos_token_ids(gguf)
    source = gguf.string("tokenizer.chat_template", "") or None
    turn_ends = [backend.token_to_id(text) for text in _TURN_ENDS if source and text in source]
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    embedding = gguf.tensors.get("token_embd.weight")
    gguf.data.close()
    return Tokenizer(
        backend,
        _ModelTokens(
            bos_token_id=bos if bos >= 0 else None,
            eos_token_ids=_unique(*eos, *(i for i in turn_ends if i in special)),
            chat_template=_chat_template(
                source,
                bos_token=backend.id_to_token(bos) if bos >= 0 else None,
                eos_token=backend.id_to_token(eos[0]) if eos else None,
            ),
            num_embeddings=embedding.shape[0] if embedding else None,
        ),
    )


def _from_folder(folder: Path) -> Tokenizer:
    names = _read_json(folder / "special_tokens_map.json")
    config = {**names, **_read_json(folder / "tokenizer_config.json")}
    model = load_model_config(str(folder)) if (folder / "config.json").is_file() else None
    bos, eos = _content(config.get("bos_token")), _content(config.get("eos_token"))
    backend = _read_backend(folder / "tokenizer.json")
    _add_missing_tokens(backend, config)
    bos_id = backend.token_to_id(bos) if bos else model.bos_token_id if model else None
    eos_id = backend.token_to_id(eos) if eos else None
    return Tokenizer(
        backend,
        _ModelTokens(
            bos_token_id=bos_id,
            eos_token_ids=_unique(*(model.eos_token_ids if model else ()), eos_id),
            chat_template=_chat_template(_template_source(folder, config), bos, eos),
            num_embeddings=model.vocab_size if model else None,
        ),
    )


def _read_backend(path: Path) -> Backend:
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises no narrower class
        raise ModelLoadError(f"{path}: not a usable tokenizer.json ({error})") from error
    backend.no_truncation()  # the file may carry the settings of some training run
    backend.no_padding()
    return backend


def _add_missing_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """tokenizer_config.json may name tokens, or say of tokens what tokenizer.json does not."""
    decoder = config.get("added_tokens_decoder")
    by_id = sorted(decoder.items(), key=_numeric) if isinstance(decoder, dict) else ()
    present = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    listed = [_added_token(entry) for _, entry in by_id if _content(entry)]
    named = {
        text: AddedToken(text, special=True, normalized=False)
        for text in _named_tokens(config)
        if text not in present and text not in {token.content for token in listed}
    }
    changed = [token for token in listed if present.get(token.content) != repr(token)]
    backend.add_tokens([*changed, *named.values()])


def _numeric(item: tuple[str, Any]) -> int:
    return int(item[0]) if item[0].isdecimal() else -1


def _named_tokens(config: Mapping[str, Any]) -> list[str]:
    extra = config.get("additional_special_tokens")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    tokens = [config.get(name) for name in names] + (extra if isinstance(extra, list) else [])
    return [text for token in tokens if (text := _content(token))]


def _added_token(entry: Any) -> AddedToken:
    flags = {
        name: bool(entry[name])
        for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
        if name in entry
    }
    return AddedToken(_content(entry) or "", **flags)


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the field of tokenizer_config.json: a string or named templates."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read_text(file)
    field = config.get("chat_template")
    if isinstance(field, list):
        named = {entry.get("name"): entry.get("template") for entry in field}
        field = named.get("default")
    return field if isinstance(field, str) else None


def _chat_template(
    source: str | None, bos_token: str | None, eos_token: str | None
) -> ChatTemplate:
    template = ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)
    if template.problem:
        logger.warning("chat is off: %s", template.problem)
    return template


def _content(token: Any) -> str | None:
    """Token files write a token as a string or as an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def _unique(*token_ids: int | None) -> tuple[int, ...]:
    return tuple(dict.fromkeys(i for i in token_ids if i is not None))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not readable ({error})") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelLoadError(f"{path}: not readable JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return value
