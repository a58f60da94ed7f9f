"""The engine without a cluster: several choices over one prompt, beam search, embeddings.

python examples/engine_alone.py
"""

from dataclasses import replace

from core.config import CacheConfig, EngineConfig
from core.request import GenerateRequest
from core.sampling_params import SamplingParams
from deploy.model_source import resolve_model
from engine.beam_search import BeamSearchParams
from engine.embedder import Embedder
from engine.llm_engine import LLMEngine, best_of
from engine.pooling import load_pooling_config
from router.tokenizer import load_tokenizer

PROMPT = "The three primary colours are"


def main() -> None:
    path = resolve_model("smollm2").path
    config = EngineConfig(model_path=path, cache=CacheConfig(memory_bytes=256 << 20))
    engine, tokenizer = LLMEngine.from_config(config), load_tokenizer(path)
    request = GenerateRequest(
        request_id="choices",
        model="smollm2",
        prompt_token_ids=tuple(tokenizer.encode(PROMPT, add_special_tokens=True)),
        eos_token_ids=tokenizer.eos_token_ids,
        num_choices=3,
        sampling=SamplingParams(temperature=0.8, seed=1, max_tokens=12, logprobs=0),
    )
    choices = engine.generate([request])  # the prompt is read once
    for chunk in best_of(choices, 2):
        mean = sum(item.logprob for item in chunk.logprobs) / len(chunk.logprobs)
        print(f"sampled {mean:7.2f} {tokenizer.decode(chunk.token_ids)!r}")
    likeliest = replace(request, sampling=SamplingParams(max_tokens=12))
    for chunk in engine.beam_search(likeliest, BeamSearchParams(beam_width=3)):
        print(f"beam    {chunk.score:7.2f} {tokenizer.decode(chunk.token_ids)!r}")

    embedder = Embedder(engine, load_pooling_config(path, engine.model_config))
    texts = ["a cat on a mat", "a kitten on a rug", "quarterly revenue"]
    vectors = embedder.embed([tokenizer.encode(t, add_special_tokens=True) for t in texts])
    print("cosines of the first text:", [round(x, 3) for x in (vectors @ vectors[0]).tolist()])


if __name__ == "__main__":
    main()
