"""Settings as frozen values: composed, never inherited; env, flags and YAML are read in deploy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from core.errors import ConfigError
from core.kv import KV_DTYPE_BYTES
from core.worker import WorkerRole, needed_roles

KERNELS = ("auto", "native", "torch")
"""What EngineConfig.kernels may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV pool of one rank. `num_blocks` wins over `memory_bytes` when both are given."""

    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int = 1 << 30
    dtype: str = "auto"
    """One of core.kv.KV_DTYPE_BYTES; auto: the engine's dtype."""
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= 256:
            raise ConfigError("block_size must be between 1 and 256")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError("num_blocks must be at least 2")
        if self.dtype not in ("auto", *KV_DTYPE_BYTES):
            raise ConfigError(
                f"the KV cache's dtype must be auto, {', '.join(KV_DTYPE_BYTES)}, "
                f"not {self.dtype!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_batched_tokens: int = 512
    """Prefill chunk budget of one step, over all sequences."""
    prefill_step_tokens: int | None = None
    """The budget while several prompts wait, before what running answers add to it: a prompt alone
    is best read in large steps, several one after another. None: max_num_batched_tokens."""
    max_num_seqs: int = 64
    """Running sequences at most."""

    def __post_init__(self) -> None:
        sizes = (self.max_num_batched_tokens, self.prefill_step_tokens, self.max_num_seqs)
        if any(size is not None and size < 1 for size in sizes):
            raise ConfigError(
                "max_num_batched_tokens, prefill_step_tokens and max_num_seqs must be positive"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Shape of one worker over ranks."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel: bool = False
    """Each expert of a mixture whole on one rank of a tensor-parallel group, instead of a slice of
    every expert on each."""
    step_timeout_s: float = 30.0
    """How long a rank waits for another one within a step until it counts as lost."""

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1 or self.pipeline_parallel_size < 1:
            raise ConfigError("tensor_parallel_size and pipeline_parallel_size must be positive")
        if self.step_timeout_s <= 0:
            raise ConfigError("step_timeout_s must be positive")

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __str__(self) -> str:
        experts = "ep" if self.expert_parallel else ""
        return f"tp{self.tensor_parallel_size}pp{self.pipeline_parallel_size}{experts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPool:
    """The workers of one role: all of one shape."""

    count: int = 1
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def num_ranks(self) -> int:
        return self.count * self.parallel.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    backend: str = "gloo"
    lease_s: float = 5.0
    """A lease not renewed for this long is over; it is the backstop, not the mechanism."""
    timeout_s: float = 30.0
    """Deadline of one transfer, connect included."""
    max_message_bytes: int = 32 << 20
    """Blocks are gathered into messages up to this size: the staging buffer of each end."""
    verify_checksum: bool = False
    """Compare a digest of each message on arrival; costs about two thirds of the bandwidth."""

    def __post_init__(self) -> None:
        if self.backend not in ("gloo", "nccl"):
            raise ConfigError(f"the transfer backend must be gloo or nccl, not {self.backend!r}")
        if min(self.lease_s, self.timeout_s, self.max_message_bytes) <= 0:
            raise ConfigError("lease_s, timeout_s and max_message_bytes must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One model on one worker."""

    model_path: str
    """A GGUF file or a folder in HF format, already resolved to this machine."""
    dtype: str = "float32"
    quantization: str | None = None
    """Format of the weight matrices: int8 or int4. None: dtype."""
    device: str = "cpu"
    kernels: str = "auto"
    """On a CPU, native: our C++ library or a ConfigError; torch: without it; auto: with it where
    it can be built."""
    kernel_cache: str | None = None
    """Folder of built kernel libraries. None: ~/.cache/twostroke/kernels."""
    num_threads: int = 1
    max_model_len: int | None = None
    """None: the model's own limit."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype must be float32 or bfloat16, not {self.dtype!r}")
        if self.quantization not in (None, "int8", "int4"):
            raise ConfigError(f"quantization must be int8 or int4, not {self.quantization!r}")
        if self.kernels not in KERNELS:
            raise ConfigError(f"kernels must be {', '.join(KERNELS)}, not {self.kernels!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker process. Port 0 takes a free port and reports it."""

    name: str
    role: WorkerRole
    served_model_name: str
    engine: EngineConfig
    transfer: TransferConfig = field(default_factory=TransferConfig)
    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    """What others dial when `host` is a wildcard; empty means `host`."""

    @property
    def dialled_host(self) -> str:
        return self.advertise_host or self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    served_model_name: str
    model_path: str
    """Where tokenizer and chat template are read from."""
    host: str = "127.0.0.1"
    port: int = 8000
    max_attempts: int = 3
    request_timeout_s: float = 600.0
    max_body_bytes: int = 8 << 20
    max_concurrent_requests: int = 1024
    enable_debug: bool = False
    """Serve /debug/requests/{id}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The desired state of one cluster."""

    router: RouterConfig
    engine: EngineConfig
    transfer: TransferConfig = field(default_factory=TransferConfig)
    prefill: WorkerPool = field(default_factory=WorkerPool)
    decode: WorkerPool = field(default_factory=WorkerPool)
    colocated: WorkerPool = field(default_factory=lambda: WorkerPool(count=0))
    """Count 0: disaggregated. Else there are no prefill and no decode workers."""

    def __post_init__(self) -> None:
        missing = [role for role in needed_roles(self.num_workers) if role not in self.num_workers]
        if missing:
            raise ConfigError(f"a cluster needs at least one {missing[0]} worker")

    @property
    def num_workers(self) -> dict[WorkerRole, int]:
        """Of each role that it has."""
        counts = {role: self.pool(role).count for role in WorkerRole}
        return {role: count for role, count in counts.items() if count > 0}

    def pool(self, role: WorkerRole) -> WorkerPool:
        pools = {
            WorkerRole.PREFILL: self.prefill,
            WorkerRole.DECODE: self.decode,
            WorkerRole.COLOCATED: self.colocated,
        }
        return pools[role]

    def engine_of(self, role: WorkerRole) -> EngineConfig:
        """In the shape of that role's workers."""
        return replace(self.engine, parallel=self.pool(role).parallel)

    @property
    def num_ranks(self) -> int:
        """Of all workers."""
        return sum(self.pool(role).num_ranks for role in WorkerRole)
