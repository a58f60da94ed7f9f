"""Which resources a cluster needs, as values: bundles of placement groups. Pure; knows no Ray.

One group per worker, one bundle per rank: workers come and go alone, the ranks of one worker only
together.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.config import ClusterConfig, EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What one rank occupies. Logical units of Ray: `cpus` are threads, `gpus` whole devices."""

    cpus: int
    gpus: int

    def resources(self) -> dict[str, float]:
        """In Ray's spelling, without the zeros."""
        amounts = {"CPU": float(self.cpus), "GPU": float(self.gpus)}
        return {name: amount for name, amount in amounts.items() if amount}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlacement:
    """`bundles[i]` belongs to rank i of the worker."""

    bundles: tuple[Bundle, ...]
    strategy: str
    """STRICT_PACK: all ranks on one node, as tensor parallelism wants; PACK: near each other."""


def place_worker(engine: EngineConfig) -> WorkerPlacement:
    """Pipeline stages may sit on different nodes, the ranks of one stage should not."""
    bundle = Bundle(cpus=engine.num_threads, gpus=int(engine.device.startswith("cuda")))
    strategy = "PACK" if engine.parallel.pipeline_parallel_size > 1 else "STRICT_PACK"
    return WorkerPlacement(bundles=(bundle,) * engine.parallel.world_size, strategy=strategy)


def total_resources(config: ClusterConfig) -> Bundle:
    """What all workers of `config` occupy together."""
    bundles = [
        bundle
        for role, count in config.num_workers.items()
        for bundle in place_worker(config.engine_of(role)).bundles * count
    ]
    return Bundle(
        cpus=sum(bundle.cpus for bundle in bundles), gpus=sum(bundle.gpus for bundle in bundles)
    )
