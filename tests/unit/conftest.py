"""Tiny random models of every family, a driver that runs batches made by hand, engines, and kernel
libraries."""

from __future__ import annotations

import json
import random
import shutil
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    SmolLM3Config,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from core.config import CacheConfig, EngineConfig
from core.sampling_params import SamplingParams
from cpu_kernels.build import SOURCES
from cpu_kernels.cpu_level import levels_here
from cpu_kernels.library import load_library
from engine.batch import Batch, SampleSpec, ScheduledSequence
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def scaled(kind, **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


FAMILIES = {
    "llama2": (LlamaConfig, {"num_key_value_heads": 6}),
    "llama3": (
        LlamaConfig,
        scaled(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-linear": (LlamaConfig, scaled("linear", factor=4.0)),
    "llama-yarn": (
        LlamaConfig,
        scaled("yarn", factor=8.0, original_max_position_embeddings=32),
    ),
    "llama-bias": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "smollm2": (LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    "mistral": (MistralConfig, {"sliding_window": 9}),
    "mistral-full": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 20}),
    "qwen3-bias": (Qwen3Config, {"head_dim": 20, "attention_bias": True}),
    "smollm3": (SmolLM3Config, {"num_hidden_layers": 5}),
    "smollm3-window": (
        SmolLM3Config,
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 7},
    ),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
        },
    ),
    "gemma2-plain": (
        Gemma2Config,
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 5,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "num_hidden_layers": 7,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 9,
            "final_logit_softcapping": 1.5,
        },
    ),
    "gemma3-scaled": (
        Gemma3TextConfig,
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "phi3": (Phi3Config, {}),
    "phi3-window": (Phi3Config, {"sliding_window": 9, "num_key_value_heads": 6}),
    "phi4-mini": (
        Phi3Config,
        {
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 256,
            **scaled(
                "longrope",
                factor=8.0,
                partial_rotary_factor=0.75,
                short_factor=[1.0, 1.1, 1.3],
                long_factor=[1.2, 4.0, 9.0],
            ),
        },
    ),
    "olmo2": (Olmo2Config, {}),
    "olmo2-bias": (Olmo2Config, {"attention_bias": True, "head_dim": 12, "rms_norm_eps": 0.01}),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
    ),
    "granite-bias": (
        GraniteConfig,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 12,
            "embedding_multiplier": 12,
            "residual_multiplier": 0.7,
        },
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 5, "sliding_window": 9}),
    "qwen2-moe": (
        Qwen2MoeConfig,
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "qwen2-moe-mixed": (
        Qwen2MoeConfig,
        {
            "num_hidden_layers": 5,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 3,
        },
    ),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 20,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-mixed": (
        Qwen3MoeConfig,
        {
            "head_dim": 20,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
}


@pytest.fixture(scope="session")
def make_hf_model():
    """A model whose parameters, biases and norms included, all matter: transformers' own initial
    values leave biases at 0, norms at 1 and logits nearly equal."""

    def make(family, seed=0, **changes):
        config_class, flags = FAMILIES[family]
        config = config_class(**{**SHAPE, **flags, **changes})
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.normal_(std=0.3 if parameter.dim() > 1 else 0.1)
                    if "gemma" in family:  # adds 1 to norms itself, and multiplies embeddings by 7
                        parameter.mul_(0.4 if "embed" in name else 1.0)
                    elif parameter.dim() == 1 and name.endswith("weight"):  # a norm's
                        parameter.add_(1.0)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def gpt2_model():
    """As make_hf_model; its config has names of its own."""
    config = GPT2Config(
        vocab_size=101,
        n_embd=48,
        n_layer=3,
        n_head=6,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(std=0.3 if parameter.dim() > 1 else 0.1)
                if ".ln_" in name and name.endswith("weight"):
                    parameter.add_(1.0)
    return model.eval()


@pytest.fixture(scope="session", params=FAMILIES)
def family(request, make_hf_model, tmp_path_factory):
    """(HF model, folder it is saved in), once per family."""
    model = make_hf_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, str(folder)


@pytest.fixture(scope="session", params=FAMILIES)
def wide_family(request, make_hf_model, tmp_path_factory):
    """As `family`, with heads that the CPU kernels can attend to."""
    changes = {
        "hidden_size": 64,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if request.param == "phi4-mini":  # a factor per pair of rotated dimensions
        factors = [1.0 + i / 4 for i in range(6)]
        scaling = {**FAMILIES["phi4-mini"][1]["rope_parameters"]}
        changes["rope_parameters"] = {**scaling, "short_factor": factors, "long_factor": factors}
    model = make_hf_model(request.param, **changes)
    folder = tmp_path_factory.mktemp(f"wide-{request.param}")
    model.save_pretrained(folder)
    return model, str(folder)


ENCODER_SHAPE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
BERT = {"attn_implementation": "eager"}
ROBERTA = {"pad_token_id": 1, "type_vocab_size": 1, "attn_implementation": "eager"}
ENCODERS = {
    "bert": (BertModel, BertConfig, BERT),
    "roberta": (RobertaModel, RobertaConfig, ROBERTA),
    "xlm-roberta": (XLMRobertaModel, XLMRobertaConfig, ROBERTA),
    "bert-scores": (BertForSequenceClassification, BertConfig, {**BERT, "num_labels": 1}),
    "roberta-scores": (
        RobertaForSequenceClassification,
        RobertaConfig,
        {**ROBERTA, "num_labels": 3},
    ),
}


@pytest.fixture(scope="session")
def make_encoder():
    """As make_hf_model, for models without a causal head."""

    def make(name):
        model_class, config_class, flags = ENCODERS[name]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = model_class(config_class(**{**ENCODER_SHAPE, **flags}))
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    parameter.normal_(std=0.3 if parameter.dim() > 1 else 0.1)
                    if "LayerNorm.weight" in parameter_name:
                        parameter.add_(1.0)
        return model.eval()

    return make


@dataclass
class Row:
    """One sequence under test. `logits[i]` gave output token i."""

    prompt: list[int]
    block_ids: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    def share(self, count):
        end = self.computed + count
        last = end == len(self.tokens)
        spec = SampleSpec(sampling=self.sampling, choice_index=0, position=end)
        return ScheduledSequence(
            request_id=f"{id(self)}",
            token_ids=tuple(self.tokens[self.computed : end]),
            num_computed_tokens=self.computed,
            block_ids=tuple(self.block_ids),
            samples=(spec,) if last else (),
        )


class Driver:
    """Runs prompts to `num_tokens` greedy tokens each, in random chunks, orders and mixtures, over
    block tables dealt at random."""

    def __init__(self, runner, prompts, *, num_tokens, seed=0):
        self._runner = runner
        self._random = random.Random(seed)
        block_size = runner.kv_cache.layout.block_size
        free = list(range(runner.kv_cache.num_blocks))
        self._random.shuffle(free)
        self._num_tokens = num_tokens
        self.rows = [
            Row(
                prompt=list(prompt),
                tokens=list(prompt),
                block_ids=[free.pop() for _ in range(-(-(len(prompt) + num_tokens) // block_size))],
                sampling=SamplingParams(temperature=0.0),
            )
            for prompt in prompts
        ]

    def run(self):
        while active := [r for r in self.rows if len(r.logits) < self._num_tokens]:
            chosen = self._random.sample(active, self._random.randint(1, len(active)))
            self._step(chosen)
        return self.rows

    def _step(self, chosen):
        shares = []
        for row in chosen:
            left = len(row.tokens) - row.computed
            shares.append(row.share(min(left, self._random.randint(1, 25))))
        logits = self._runner.logits(Batch(sequences=tuple(shares)))
        sampled = iter(logits)
        for row, share in zip(chosen, shares, strict=True):
            row.computed += len(share.token_ids)
            if share.samples:
                row.logits.append(next(sampled))
                row.tokens.append(int(row.logits[-1].argmax()))


@pytest.fixture(scope="session")
def drive():
    def run(runner, prompts, num_tokens=16, seed=0):
        return Driver(runner, prompts, num_tokens=num_tokens, seed=seed).run()

    return run


@pytest.fixture(scope="session", params=[*levels_here(), "emulated amx"])
def kernel_library(request, tmp_path_factory):
    """The CPU kernels at every level that this CPU can run, and with AMX's tiles emulated."""
    if request.param in levels_here():
        return load_library(request.param, note=print)
    sources = tmp_path_factory.mktemp("emulated") / "csrc"
    shutil.copytree(SOURCES, sources)
    tiles = sources / "tiles.h"
    tiles.write_text(f"#define TWOSTROKE_EMULATE_AMX\n{tiles.read_text()}")
    return load_library(sources=sources, note=print)


@pytest.fixture(scope="session")
def make_runner():
    def make(model_path, *, num_blocks=128, block_size=4, kv_dtype="auto", rank=None, **config):
        cache = CacheConfig(block_size=block_size, num_blocks=num_blocks, dtype=kv_dtype)
        return ModelRunner(EngineConfig(model_path=model_path, cache=cache, **config), rank=rank)

    return make


@pytest.fixture(scope="session")
def make_token_engine(token_executor, engine_config):
    """(colocated engine over the token executor, that executor)."""

    def make(max_model_len=1000, **sizes):
        config = engine_config(**sizes)
        cache = config.cache
        executor = token_executor(cache.num_blocks, cache.block_size, max_model_len)
        return LLMEngine(config, executor), executor

    return make


@pytest.fixture(scope="session")
def run_to_the_end():
    """Tokens by (request id, choice), the pool checked after every step; `abort_at`: step before
    which a request is aborted, by id."""

    def run(engine, abort_at):
        tokens = defaultdict(list)
        step = 0
        while engine.has_unfinished_requests:
            for request_id, when in abort_at.items():
                if when == step:
                    engine.abort(request_id)
            for output in engine.step():
                tokens[output.request_id, output.choice_index] += output.chunk.token_ids
            engine.pool.check()
            step += 1
            assert step < 2000, "no progress"
        return tokens

    return run


@pytest.fixture(scope="session")
def assert_equals_hf():
    """Tokens equal the reference's greedy ones and each logit is within `tolerance` of its.

    HF computes each finished sequence in one pass; a row of that pass is the reference for the
    token after it.
    """

    @torch.no_grad()
    def check(rows, model, tolerance=1e-4):
        for row in rows:
            expected = model(torch.tensor([row.tokens])).logits[0, len(row.prompt) - 1 : -1]
            logits = torch.stack(row.logits)
            torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)
            assert row.tokens[len(row.prompt) :] == expected.argmax(-1).tolist()

    return check


@pytest.fixture(scope="session")
def prompts():
    """Lengths around the block size, the chunk size and the tiny models' sliding windows."""
    generator = random.Random(5)
    return [[generator.randrange(101) for _ in range(n)] for n in (1, 4, 7, 9, 17, 40, 61)]


@pytest.fixture(scope="session")
def change_config():
    """Rewrite keys of a saved model's config.json."""

    def change(folder, changes):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change
