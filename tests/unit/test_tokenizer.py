"""Token ids against the reference of each kind of file: llama.cpp's ids for the GGUF (recorded),
transformers for tokenizer.json folders, and a plain SentencePiece for scores in GGUF. Then what a
tokenizer says of a prompt's text, and what it makes of words that are not wanted."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer

from core.errors import InvalidRequestError, ModelLoadError
from router.chat_template import ChatMessage
from router.tokenizer import load_tokenizer

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "smollm2-tokens.json").read_text())
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    ChatMessage(role="user", content="Why 2024?  <s> or </s>"),
    ChatMessage(role="assistant", content="日本 👩‍👩‍👧"),
    ChatMessage(role="user", content="  ok\n"),
]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# The patterns as the models' own tokenizer.json files have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
PRE_TOKENIZERS = {
    "gpt-2": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated")],
    "qwen2": [pre_tokenizers.Split(Regex(QWEN2), "isolated")],
}


def make_texts() -> list[str]:
    """The oracle's strings and 1,500 mixes of scripts, emoji, digits, code, blanks, specials."""
    rng = random.Random(7)
    parts = [
        *("word", "the", "don't", "WE'LL", "3", "42", "12345678", "٣٤", "Ⅻ", "½", " ", "  ", "\t"),
        *("\n", "\r\n", "\n\n\n", "        ", "\u00a0", "\u3000", "日本語", "你好", "한국어"),
        *("हिन्दी", "עברית", "العربية", "ไทย", "Ελλάδα", "Кириллица", "e\u0301", "é", "🙂", "🌶️"),
        *(
            "👩‍👩‍👧‍👦",
            "🏳️‍🌈",
            "🇩🇪",
            "def f(x):\n    return x+1",
            "a_b->c()",
            "...",
            "!?",
            "$9.99",
            "▁",
            "𝔘",
        ),
        *("<0x41>", "\ufffd", "\u0000", *SPECIAL, "<|im_", "< s>", "</S>"),
    ]
    mixed = ["".join(rng.choices(parts, k=rng.randint(1, 12))) for _ in range(1500)]
    return [*(row["text"] for row in ORACLE["rows"]), *mixed]


TEXTS = make_texts()


def byte_level(pre=(), *, num_tokens=900, ignore_merges=False) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*pre, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not _splits(pre))]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        TEXTS, BpeTrainer(vocab_size=num_tokens, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("def f", normalized=False)])
    return backend


def _splits(pre) -> bool:
    return any(isinstance(step, pre_tokenizers.Split) for step in pre)


def sentencepiece(*, metaspace: bool) -> tokenizers.Tokenizer:
    """Llama 2's kind, with the normalizer of old files or the pre-tokenizer of new ones."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    words = [text.encode("ascii", "ignore").decode() for text in TEXTS if "<" not in text]
    trained.train_from_iterator(words, BpeTrainer(vocab_size=800, show_progress=False))
    state = json.loads(trained.to_str())["model"]
    learned = sorted(state["vocab"], key=state["vocab"].__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in state["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
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
    backend.add_special_tokens(SPECIAL)
    return backend


def with_bos(backend: tokenizers.Tokenizer, *, eos: bool = False) -> tokenizers.Tokenizer:
    names = ["<s>", "</s>"] if eos else ["<s>"]
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A", *names[1:]],
        special_tokens=[(name, backend.token_to_id(name)) for name in names],
    )
    return backend


KINDS = {
    "byte-level": lambda: byte_level(),
    "byte-level-bos": lambda: with_bos(byte_level(PRE_TOKENIZERS["llama-bpe"])),
    "byte-level-bos-eos": lambda: with_bos(byte_level(), eos=True),
    "prepend": lambda: with_bos(sentencepiece(metaspace=False)),
    "metaspace": lambda: with_bos(sentencepiece(metaspace=True)),
}


def save_folder(folder: Path, backend: tokenizers.Tokenizer, **config) -> str:
    backend.enable_truncation(8)  # as real files do; no serving tokenizer may obey it
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory) -> str:
    return save_folder(tmp_path_factory.mktemp(request.param), KINDS[request.param]())


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_tokenizer(smollm2_path)


@pytest.fixture
def adds_bos(tmp_path):
    """SentencePiece-like: a BOS before and a space mark at the start of every text."""
    tokens = ["<s>", "▁", "a", "b", "▁a", "▁ab", "<0xC3>", "<0xA9>"]
    merges = [("▁", "a"), ("▁a", "b")]
    backend = tokenizers.Tokenizer(
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


@pytest.fixture
def write_gguf(tmp_path):
    """Writes a vocabulary-only GGUF file of a byte-level tokenizer; returns its path."""

    def write(backend=None, *, model="gpt2", pre="gpt-2", bos=None, tokens=None, **fields) -> str:
        path = tmp_path / "vocab.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model(model)
        if pre:
            writer.add_tokenizer_pre(pre)
        if backend is not None:
            vocab, added = backend.get_vocab(), backend.get_added_tokens_decoder()
            tokens = sorted(vocab, key=vocab.__getitem__)
            fields["types"] = [_token_type(added.get(i)) for i in range(len(tokens))]
            merges = json.loads(backend.to_str())["model"]["merges"]
            writer.add_token_merges([" ".join(merge) for merge in merges])
        writer.add_token_list(tokens)
        writer.add_token_types(fields["types"])
        if scores := fields.get("scores"):
            writer.add_token_scores(scores)
        writer.add_bos_token_id(tokens.index(bos or "<s>"))
        writer.add_eos_token_id(tokens.index("</s>"))
        if "add_bos" in fields:
            writer.add_add_bos_token(fields["add_bos"])
        if template := fields.get("template"):
            writer.add_chat_template(template)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return str(path)

    return write


def _token_type(added: AddedToken | None) -> int:
    return NORMAL if added is None else CONTROL if added.special else USER_DEFINED


# The default model's GGUF file


def test_every_string_has_the_ids_that_llama_cpp_gives(smollm2):
    assert len(ORACLE["rows"]) > 2000
    wrong = [
        row["text"]
        for row in ORACLE["rows"]
        if smollm2.encode(row["text"], add_special_tokens=False) != row["token_ids"]
    ]
    assert wrong == []


def test_every_string_comes_back(smollm2):
    for text in TEXTS:
        token_ids = smollm2.encode(text, add_special_tokens=False)
        assert smollm2.decode(token_ids, skip_special_tokens=False) == text
        stream = smollm2.stream()
        pieces = [stream.push([token_id]) for token_id in token_ids]
        assert "".join(pieces) + stream.finish() == smollm2.decode(token_ids)
        assert b"".join(map(smollm2.token_bytes, token_ids)) == text.encode()


def test_the_default_models_facts(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.encode("Hi", add_special_tokens=True) == smollm2.encode(
        "Hi", add_special_tokens=False
    ), "this model wants no BOS"


def test_the_default_models_chat(smollm2):
    chat = [ChatMessage(role="user", content="Hi")]
    text = smollm2.render_chat(chat)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.encode_chat(chat) == smollm2.encode(text, add_special_tokens=False)
    assert smollm2.encode_chat(chat)[:2] == [1, 9690]


def test_other_threads_run_while_a_long_text_is_encoded(smollm2):
    """The event loop's thread is one of them."""
    ticks, over = [], threading.Event()

    def tick():
        while not over.wait(0.001):
            ticks.append(None)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(tick)
        before = len(ticks)
        smollm2.encode("some words and more of them " * 10_000, add_special_tokens=False)
        num_ticks = len(ticks) - before
        over.set()
    assert num_ticks > 5


def test_threads_share_one_tokenizer(smollm2):
    texts = TEXTS[:400]
    alone = [smollm2.encode(text, add_special_tokens=True) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda t: smollm2.encode(t, add_special_tokens=True), texts * 4))
    assert together == alone * 4


# tokenizer.json folders


def test_ids_and_text_are_those_of_transformers(folder):
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        plain = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == plain
        if not text.startswith("<s>"):
            expected = theirs.encode(text, add_special_tokens=True)
            assert ours.encode(text, add_special_tokens=True) == expected
        assert ours.decode(plain) == theirs.decode(plain, skip_special_tokens=True)
        assert ours.decode(plain, False) == theirs.decode(plain)


def test_a_chat_has_the_ids_that_transformers_gives(folder):
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": turn.role, "content": turn.content} for turn in CHAT]
    assert ours.render_chat(CHAT) == theirs.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False
    )
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(CHAT) == expected


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("kind", ["byte-level", "byte-level-bos"])
def test_tokenizer_json_decides_about_bos_as_in_transformers(tmp_path, kind, add_bos):
    path = save_folder(tmp_path, KINDS[kind](), add_bos_token=add_bos)
    theirs = AutoTokenizer.from_pretrained(path)
    got = load_tokenizer(path).encode("Hi", add_special_tokens=True)
    assert got == theirs.encode("Hi")


def test_tokens_that_only_tokenizer_config_names(tmp_path):
    added = {
        "1500": {"content": "<|two|>", "special": True, "normalized": False},
        "1499": {"content": "<|one|>", "special": False, "normalized": False},
    }
    path = save_folder(tmp_path, byte_level(), added_tokens_decoder=added, pad_token="<|pad|>")
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(path)
    text = "a<|one|>b<|two|>c<|pad|>d"
    token_ids = theirs.encode(text)
    assert ours.encode(text, add_special_tokens=True) == token_ids
    assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)


def test_template_files_and_named_templates(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    path = save_folder(tmp_path, byte_level(), chat_template=named)
    assert load_tokenizer(path).render_chat(CHAT) == "D"
    (tmp_path / "chat_template.jinja").write_text("F{{ eos_token }}")
    assert load_tokenizer(path).render_chat(CHAT) == "F<|im_end|>"


def test_a_model_without_chat_template_still_completes(tmp_path):
    ours = load_tokenizer(save_folder(tmp_path, byte_level(), chat_template=None))
    assert ours.encode("Hi", add_special_tokens=True)
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        ours.encode_chat(CHAT)
    assert caught.value.param == "messages"


def test_ends_of_generation_come_from_all_places(tiny_model, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((Path(tiny_model) / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [259, 260]}')
    ours = load_tokenizer(str(tmp_path))
    assert ours.eos_token_ids == (259, 260, 257)
    assert ours.vocab_size == 300


def test_ids_that_the_model_lacks_are_refused(tiny_model, tmp_path):
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((Path(tiny_model) / name).read_bytes())
    config = {"pad_token": "<pad>"}  # becomes id 300 of a model with 300 rows
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(str(tmp_path))
    assert ours.vocab_size == 300
    with pytest.raises(InvalidRequestError, match="lacks"):
        ours.encode("a<pad>", add_special_tokens=False)


# BOS exactly once


@pytest.mark.parametrize("kind", ["byte-level-bos", "prepend", "metaspace"])
@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("{{ bos_token }}", "")])
def test_bos_stands_at_the_start_exactly_once(tmp_path, kind, template):
    ours = load_tokenizer(save_folder(tmp_path, KINDS[kind](), chat_template=template))
    bos = ours.bos_token_id
    plain = ours.encode("Hi", add_special_tokens=False)
    assert bos not in plain
    assert ours.encode("Hi", add_special_tokens=True) == [bos, *plain]
    with_text_bos = ours.encode("<s>Hi", add_special_tokens=True)
    assert with_text_bos == ours.encode("<s>Hi", add_special_tokens=False)
    assert with_text_bos[0] == bos
    assert with_text_bos.count(bos) == 1
    assert ours.encode("", add_special_tokens=True) == [bos]
    chat = [ChatMessage(role="user", content="Hi")]
    assert ours.encode_chat(chat)[0] == bos
    assert ours.encode_chat(chat).count(bos) == 1


def test_a_chat_gets_no_eos_from_the_post_processor(tmp_path):
    ours = load_tokenizer(save_folder(tmp_path, KINDS["byte-level-bos-eos"]()))
    eos = ours.encode("</s>", add_special_tokens=False)
    assert ours.encode("Hi", add_special_tokens=True)[-1:] == eos
    assert ours.encode_chat(CHAT)[-1:] != eos


# GGUF vocabularies


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_a_gguf_file_has_the_ids_of_the_tokenizer_it_was_made_from(write_gguf, pre):
    origin = byte_level(PRE_TOKENIZERS[pre], ignore_merges=pre == "llama-bpe")
    if pre == "qwen2":
        origin.normalizer = normalizers.NFC()
    ours = load_tokenizer(write_gguf(origin, pre=pre))
    for text in TEXTS:
        expected = origin.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.decode(expected) == origin.decode(expected)


def test_the_pre_tokenizer_matters(write_gguf):
    """Else the test above could not fail: the same vocabulary, cut by another rule."""
    origin = byte_level()
    ours = load_tokenizer(write_gguf(origin, pre="smollm"))
    text = "in 12345678"
    assert ours.encode(text, add_special_tokens=False) != origin.encode(text).ids


def test_a_gguf_file_says_whether_bos_is_added(write_gguf):
    origin = byte_level()
    hello = origin.encode("Hi").ids
    bos = [origin.token_to_id("<s>")]
    for fields, start in [
        ({"pre": "llama-bpe"}, bos),
        ({"pre": "llama-bpe", "add_bos": False}, []),
        ({"pre": "gpt-2"}, []),
        ({"pre": "gpt-2", "add_bos": True}, bos),
    ]:
        ours = load_tokenizer(write_gguf(origin, **fields))
        assert ours.encode("Hi", add_special_tokens=True) == [*start, *hello], fields
        assert ours.encode("<s>Hi", add_special_tokens=True) == [*bos, *hello], fields


def test_a_gguf_chat_also_ends_where_its_template_ends_a_turn(write_gguf):
    origin = byte_level()
    eos, im_end = origin.token_to_id("</s>"), origin.token_to_id("<|im_end|>")
    assert load_tokenizer(write_gguf(origin)).eos_token_ids == (eos,)
    ours = load_tokenizer(write_gguf(origin, template=TEMPLATE))
    assert ours.eos_token_ids == (eos, im_end)
    assert ours.render_chat(CHAT).startswith("<s><|im_start|>user\n")


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE as its paper has it: join the best pair, the leftmost of equals."""
    symbols = list(text)
    while True:
        pairs = [a + b for a, b in pairwise(symbols)]
        known = [(-scores[pair], i) for i, pair in enumerate(pairs) if pair in scores]
        if not known:
            return symbols
        _, i = min(known)
        symbols[i : i + 2] = [pairs[i]]


@pytest.mark.parametrize("prefix", ["▁", ""])
def test_sentencepiece_scores_in_a_gguf_file(write_gguf, prefix, tmp_path):
    trained = json.loads(sentencepiece(metaspace=False).to_str())["model"]["vocab"]
    tokens = sorted(trained, key=trained.__getitem__)
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    rank = {token: -float(i) for i, token in enumerate(tokens[259:])}
    path = write_gguf(
        model="llama",
        pre="default",
        tokens=tokens,
        types=types,
        scores=[0.0] * 259 + list(rank.values()),
    )
    ours = load_tokenizer(path if prefix else without_space_prefix(path))
    for text in TEXTS:
        if "<" in text or "\0" in text:
            continue  # special tokens: compared with transformers above
        expected = []
        for piece in merge_by_score(prefix + text.replace(" ", "▁"), rank):
            known = piece in rank
            expected += [trained[piece]] if known else [3 + byte for byte in piece.encode()]
        if not text:
            expected = []
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.encode(text, add_special_tokens=True) == [1, *expected]
        assert ours.decode(expected) == text.replace("▁", " ")


def without_space_prefix(path: str) -> str:
    """Adds `tokenizer.ggml.add_space_prefix = false` to a GGUF file's metadata."""
    data = bytearray(Path(path).read_bytes())
    count = int.from_bytes(data[16:24], "little")
    key = b"tokenizer.ggml.add_space_prefix"
    entry = len(key).to_bytes(8, "little") + key + (7).to_bytes(4, "little") + b"\0"
    data[16:24] = (count + 1).to_bytes(8, "little")
    data[24:24] = entry
    Path(path).write_bytes(data)
    return path


# Refusals


def test_unknown_kinds_of_gguf_tokenizers_are_refused(write_gguf):
    origin = byte_level(num_tokens=300)
    with pytest.raises(ModelLoadError, match=r"pre-tokenizer 'mystery' is not known.*smollm"):
        load_tokenizer(write_gguf(origin, pre="mystery"))
    with pytest.raises(ModelLoadError, match=r"'t5' is not supported \(known: gpt2, llama\)"):
        load_tokenizer(write_gguf(origin, model="t5"))


def test_a_missing_name_means_gguf_default(write_gguf, caplog):
    origin = byte_level()
    ours = load_tokenizer(write_gguf(origin, pre=""))
    assert "names no pre-tokenizer" in caplog.text
    assert ours.encode("(a 2024)", add_special_tokens=False) == [
        i for part in ("(", "a", " ", "202", "4", ")") for i in origin.encode(part).ids
    ]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{"}, "not a usable tokenizer.json"),
        ({"tokenizer.json": '{"version": "9"}'}, "not a usable tokenizer.json"),
        ({"tokenizer_config.json": "[1]"}, "not a JSON object"),
        ({"tokenizer_config.json": "nope"}, "not readable JSON"),
        ({"config.json": "{}"}, "config.json"),
    ],
)
def test_a_bad_folder_gets_one_clear_line(tmp_path, files, reason):
    if files and "tokenizer.json" not in files:
        save_folder(tmp_path, byte_level(num_tokens=300))
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=reason) as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_path_that_is_no_model(tmp_path):
    with pytest.raises(ModelLoadError, match="no such model"):
        load_tokenizer(str(tmp_path / "absent"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(ModelLoadError, match="not a readable GGUF"):
        load_tokenizer(str(tmp_path / "x.gguf"))


def test_text_that_is_not_unicode_is_the_clients_fault(smollm2):
    with pytest.raises(InvalidRequestError, match="Unicode"):
        smollm2.encode("half a pair: \ud83d", add_special_tokens=False)


# A prompt's text, and words that are not wanted


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
