"""A `tokenizers.Tokenizer` from the vocabulary in a GGUF file's metadata.

GGUF stores tokens, types, merges or scores, and only the *name* of the pre-tokenizer
(`tokenizer.ggml.pre`): the rule behind the name decides where words are cut before BPE, and a wrong
one gives plausible but wrong ids. So names are mapped one by one and unknown ones are refused.
Knows nothing of chats, stop strings or streams.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from core.errors import ModelLoadError
from core.gguf_file import GGUFFile

logger = logging.getLogger(__name__)

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_NORMAL = 1
_SPACE_MARK = "\u2581"

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How text is cut before BPE: each pattern in turn cuts the pieces that the one before left."""

    patterns: tuple[str, ...]
    nfc: bool = False
    """Text is brought to Unicode's composed form first, as in the model's own tokenizer."""
    ignore_merges: bool = False
    """A piece that is a token as a whole is taken whole."""
    add_bos: bool = False
    """Unless `tokenizer.ggml.add_bos_token` says otherwise."""


_PLAIN = PreTokenizer(patterns=(_GPT2,))
_DIGITS = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_LLAMA_BPE = PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(
        patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
    ),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(patterns=(_LLAMA3,))),
    "qwen2": PreTokenizer(patterns=(_QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), PreTokenizer(patterns=(_QWEN2,))),
    "tekken": PreTokenizer(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True),
}


def build_backend(gguf: GGUFFile) -> Backend:
    """Raises ModelLoadError for a kind of tokenizer or pre-tokenizer that is not known here."""
    tokens = gguf.strings("tokenizer.ggml.tokens")
    types = _token_types(gguf, len(tokens))
    kind = gguf.string("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level_bpe(gguf, tokens)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece_bpe(gguf, tokens, types)
    else:
        raise ModelLoadError(
            f"{gguf.path.name}: tokenizer.ggml.model {kind!r} is not supported (known: gpt2, llama)"
        )
    _add_tokens(backend, tokens, types)
    _add_bos_and_eos(gguf, backend, tokens, adds_bos)
    return backend


def _token_types(gguf: GGUFFile, num_tokens: int) -> list[int]:
    if "tokenizer.ggml.token_type" not in gguf.metadata:
        return [_NORMAL] * num_tokens
    types = gguf.integers("tokenizer.ggml.token_type")
    if len(types) != num_tokens:
        raise ModelLoadError(
            f"{gguf.path.name}: {num_tokens} tokens but {len(types)} entries in token_type"
        )
    return types


def _byte_level_bpe(gguf: GGUFFile, tokens: Sequence[str]) -> tuple[Backend, bool]:
    rule = _pre_tokenizer(gguf)
    merges = [_split_merge(gguf, merge) for merge in gguf.strings("tokenizer.ggml.merges")]
    backend = Backend(
        _bpe(gguf, {token: i for i, token in enumerate(tokens)}, merges, rule.ignore_merges)
    )
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, rule.add_bos


def _pre_tokenizer(gguf: GGUFFile) -> PreTokenizer:
    name = gguf.string("tokenizer.ggml.pre", "")
    if not name:
        logger.warning("%s names no pre-tokenizer: taking GGUF's default", gguf.path.name)
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise ModelLoadError(
            f"{gguf.path.name}: pre-tokenizer {name!r} is not known, its tokens would be wrong "
            f"(known: {', '.join(sorted(PRE_TOKENIZERS))})"
        )
    return PRE_TOKENIZERS[name]


def _split_merge(gguf: GGUFFile, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ModelLoadError(f"{gguf.path.name}: {merge!r} is no merge of two tokens")
    return left, right


def _bpe(
    gguf: GGUFFile,
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    ignore_merges: bool = False,
    byte_fallback: bool = False,
    unk_token: str | None = None,
) -> models.BPE:
    try:
        return models.BPE(
            vocab=vocab,
            merges=merges,
            ignore_merges=ignore_merges,
            byte_fallback=byte_fallback,
            unk_token=unk_token,
            fuse_unk=unk_token is not None,
        )
    except Exception as error:  # tokenizers raises no narrower class
        raise ModelLoadError(f"{gguf.path.name}: bad vocabulary or merges ({error})") from error


def _sentencepiece_bpe(
    gguf: GGUFFile, tokens: Sequence[str], types: Sequence[int]
) -> tuple[Backend, bool]:
    """SentencePiece merges the pair whose joined piece scores highest; as ranked merges that is
    every way to split every piece in two, ordered by the piece's score."""
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges_from_scores(_pieces_by_score(gguf, tokens, types))
    backend = Backend(_bpe(gguf, vocab, merges, byte_fallback=_BYTE in types, unk_token=unknown))
    prefix = bool(gguf.metadata.get("tokenizer.ggml.add_space_prefix", True))
    to_mark = normalizers.Replace(" ", _SPACE_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), to_mark]) if prefix else to_mark
    )
    to_text: list[decoders.Decoder] = [
        decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(),
    ]  # fmt: skip
    backend.decoder = decoders.Sequence(
        [*to_text, decoders.Strip(" ", 1, 0)] if prefix else to_text
    )
    return backend, True


def _pieces_by_score(
    gguf: GGUFFile, tokens: Sequence[str], types: Sequence[int]
) -> dict[str, float]:
    scores = gguf.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelLoadError(f"{gguf.path.name}: tokenizer.ggml.scores is missing or too short")
    return {
        token: float(score)
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind in (_NORMAL, _UNUSED) and isinstance(score, (int, float))
    }


def _merges_from_scores(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    best_first = sorted(pieces, key=pieces.__getitem__, reverse=True)
    return [
        (piece[:i], piece[i:])
        for piece in best_first
        for i in range(1, len(piece))
        if piece[:i] in pieces and piece[i:] in pieces
    ]


def _add_tokens(backend: Backend, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control and user-defined tokens are found in text before any cutting; control ones leave no
    text behind when decoded."""
    added = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if token and kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)


def _add_bos_and_eos(
    gguf: GGUFFile, backend: Backend, tokens: Sequence[str], adds_bos: bool
) -> None:
    start = _edge_token(gguf, tokens, "bos", adds_bos)
    end = _edge_token(gguf, tokens, "eos", False)
    if start or end:
        edges = [edge for edge in (start, end) if edge]
        backend.post_processor = processors.TemplateProcessing(
            single=[*(["BOS"] if start else []), "$A", *(["EOS"] if end else [])],
            special_tokens=edges,
        )


def _edge_token(
    gguf: GGUFFile, tokens: Sequence[str], name: str, default: bool
) -> dict[str, object] | None:
    token_id = gguf.integer(f"tokenizer.ggml.{name}_token_id", -1)
    wanted = bool(gguf.metadata.get(f"tokenizer.ggml.add_{name}_token", default))
    if not wanted or not 0 <= token_id < len(tokens):
        return None
    return {"id": name.upper(), "ids": [token_id], "tokens": [tokens[token_id]]}
