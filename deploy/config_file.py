"""Settings from a YAML file, the environment and flags, as one value: Settings.

Flags win over TWOSTROKE_* variables, variables over the file, the file over defaults. All three are
read here, once, by the same parsers; nothing else in the project reads the environment. An unknown
key, variable or value is an error that names it.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from core.config import (
    KERNELS,
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ParallelConfig,
    RouterConfig,
    SchedulerConfig,
    TransferConfig,
    WorkerConfig,
    WorkerPool,
)
from core.errors import ConfigError
from core.kv import KV_DTYPE_BYTES
from core.worker import WorkerRole, endpoint, needed_roles
from deploy.model_source import DEFAULT_MODEL, ResolvedModel

ENV_PREFIX = "TWOSTROKE_"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator can say, flat. Sizes in tokens, blocks or bytes as named."""

    model: str = DEFAULT_MODEL
    served_model_name: str | None = None
    prefill: WorkerPool | None = None
    decode: WorkerPool | None = None
    colocated: WorkerPool | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Of one worker started by hand."""
    host: str = "127.0.0.1"
    port: int = 8000
    advertise_host: str | None = None
    device: str = "cpu"
    kernels: str = "auto"
    dtype: str = "float32"
    quantization: str | None = None
    threads: int = 0
    block_size: int = 16
    kv_memory: int = 1 << 30
    kv_cache_dtype: str = "auto"
    no_prefix_cache: bool = False
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    prefill_step_tokens: int | None = None
    max_num_seqs: int = 64
    request_timeout: float = 600.0
    verify_checksum: bool = False
    debug: bool = False
    backend: str = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How one field of Settings is read from text and explained."""

    parse: Callable[[str], object]
    help: str
    metavar: str = "N"
    is_switch: bool = False
    """On the command line it takes no value: naming it means true."""
    implied: str | None = None
    """What naming it on the command line without a value means."""


def _whole(text: str) -> int:
    if re.fullmatch(r"-\d+", text):
        raise ValueError("must not be negative")
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


def _positive(text: str) -> int:
    if re.fullmatch(r"-\d+|0+", text):
        raise ValueError("must be at least 1")
    return _whole(text)


def _port(text: str) -> int:
    value = _whole(text)
    if value > 65535:
        raise ValueError(f"{value} is not a port")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of seconds") from None
    if not 0 < value < float("inf"):
        raise ValueError("must be a positive number of seconds")
    return value


def parse_bytes(text: str) -> int:
    """`1073741824`, `1GiB`, `512 MB`, `2g`: powers of ten, or of two with an i."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if not match:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def parse_parallel(text: str) -> ParallelConfig:
    """`tp2`, `pp3`, `tp2pp3`; `ep` at the end for whole experts."""
    match = re.fullmatch(r"(?:tp([1-9]\d*))?(?:pp([1-9]\d*))?(ep)?", text)
    if not match or not text:
        raise ValueError(f"{text!r} is not a shape such as tp2, pp2 or tp2pp2")
    tp, pp, experts = match.groups()
    return ParallelConfig(
        tensor_parallel_size=int(tp or 1),
        pipeline_parallel_size=int(pp or 1),
        expert_parallel=experts is not None,
    )


def parse_pool(text: str, at_least: int = 0) -> WorkerPool:
    """`2` workers of one rank, `2xtp4` of four ranks each, `tp2pp2`: one worker of four."""
    match = re.fullmatch(r"([-+]?\d+)(?:x(.*))?", text)
    count, shape = match.groups() if match else ("1", text)
    if int(count) < at_least:
        raise ValueError(f"must be at least {at_least}")
    parallel = ParallelConfig() if shape is None else parse_parallel(shape)
    return WorkerPool(count=int(count), parallel=parallel)


def _some_workers(text: str) -> WorkerPool:
    return parse_pool(text, at_least=1)


def _flag(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True}
    words |= {"false": False, "0": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError(f"{text!r} is not true or false")
    return words[text.lower()]


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse


def _text(text: str) -> str:
    if not text:
        raise ValueError("is empty")
    return text


def _host(text: str) -> str:
    """A name or an address; IPv6 with brackets or without, kept without."""
    bracketed = re.fullmatch(r"\[(.+)\]", text)
    return bracketed[1] if bracketed else _text(text)


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise ValueError(f"{text!r} is not cpu, cuda or cuda:N")
    return text


SETTINGS: Mapping[str, Setting] = {
    "model": Setting(
        parse=_text, metavar="MODEL", help="GGUF file, HF folder, hub id or smollm2 (the default)"
    ),
    "served_model_name": Setting(
        parse=_text, metavar="NAME", help="name clients ask for (default: from the model)"
    ),
    "prefill": Setting(
        parse=_some_workers,
        metavar="N[xSHAPE]",
        help="prefill workers: they read prompts (default 1). 2xtp4pp2: two, each over 8 ranks, "
        "4 per layer in 2 runs of layers",
    ),
    "decode": Setting(
        parse=_some_workers,
        metavar="N[xSHAPE]",
        help="decode workers: they write answers (default 1)",
    ),
    "colocated": Setting(
        parse=parse_pool,
        metavar="N[xSHAPE]",
        implied="1",
        help="instead of both: workers that do both (default 0; without N: 1)",
    ),
    "parallel": Setting(
        parse=parse_parallel,
        metavar="SHAPE",
        help="ranks of this worker: tp2 splits each layer over 2, pp2 the layers, ep keeps experts "
        "whole (default tp1pp1)",
    ),
    "host": Setting(parse=_host, metavar="HOST", help="address to listen on (default 127.0.0.1)"),
    "port": Setting(parse=_port, metavar="PORT", help="port to listen on; 0 takes a free one"),
    "advertise_host": Setting(
        parse=_host,
        metavar="HOST",
        help="address of this worker that the others dial (default: --host)",
    ),
    "device": Setting(
        parse=_device, metavar="DEVICE", help="where the model runs: cpu (the default) or cuda[:N]"
    ),
    "kernels": Setting(
        parse=_one_of(*KERNELS),
        metavar="KIND",
        help="on a CPU: native (ours in C++, built once with g++), torch, or auto (the default: "
        "native where it can be built)",
    ),
    "dtype": Setting(
        parse=_one_of("float32", "bfloat16"),
        metavar="TYPE",
        help="float32 (the default) or bfloat16: weights, KV and arithmetic",
    ),
    "quantization": Setting(
        parse=_one_of("int8", "int4"),
        metavar="FORMAT",
        help="hold weight matrices in int8 or int4 (default: in --dtype)",
    ),
    "threads": Setting(
        parse=_whole, help="CPU threads of each rank (default, and 0: its share of the cores)"
    ),
    "block_size": Setting(parse=_positive, help="positions in one KV block (default 16)"),
    "kv_memory": Setting(
        parse=parse_bytes, metavar="SIZE", help="KV cache of each rank (default 1GiB)"
    ),
    "kv_cache_dtype": Setting(
        parse=_one_of("auto", *KV_DTYPE_BYTES),
        metavar="TYPE",
        help="KV cache: auto (the default: as dtype), float32, bfloat16, int8 or fp8",
    ),
    "no_prefix_cache": Setting(
        parse=_flag,
        is_switch=True,
        help="compute every prompt whole, even where its beginning is known",
    ),
    "max_model_len": Setting(
        parse=_positive, help="longest prompt plus answer, in tokens (default: the model's)"
    ),
    "max_num_batched_tokens": Setting(
        parse=_positive, help="prompt tokens of one prefill step (default 512)"
    ),
    "prefill_step_tokens": Setting(
        parse=_positive,
        help="the same while several prompts wait, before what running answers add "
        "(default 64 on a CPU, else --max-num-batched-tokens)",
    ),
    "max_num_seqs": Setting(
        parse=_positive, help="requests that one worker runs at a time (default 64)"
    ),
    "request_timeout": Setting(
        parse=_seconds, metavar="S", help="deadline of one request (default 600)"
    ),
    "verify_checksum": Setting(
        parse=_flag,
        is_switch=True,
        help="compare a digest of all KV that arrives; on all workers or on none",
    ),
    "debug": Setting(
        parse=_flag, is_switch=True, help="serve GET /debug/requests/{id}: where the time went"
    ),
    "backend": Setting(
        parse=_one_of("ray", "processes", "local"),
        metavar="WHERE",
        help="where workers live: ray (actors, the default), processes, or local (this process)",
    ),
}
assert set(SETTINGS) == set(Settings.__dataclass_fields__), "one parser per setting"

ENGINE_SETTINGS = (
    "model",
    "served_model_name",
    "device",
    "kernels",
    "dtype",
    "quantization",
    "threads",
    "block_size",
    "kv_memory",
    "kv_cache_dtype",
    "no_prefix_cache",
    "max_model_len",
    "max_num_batched_tokens",
    "prefill_step_tokens",
    "max_num_seqs",
)
WORKER_SETTINGS = (
    *ENGINE_SETTINGS,
    "parallel",
    "verify_checksum",
    "host",
    "port",
    "advertise_host",
)
UP_SETTINGS = tuple(key for key in SETTINGS if key not in ("advertise_host", "parallel"))
"""Workers that `up` starts are on this machine and dialled there; each role has its shape."""
ROUTER_SETTINGS = ("model", "served_model_name", "host", "port", "request_timeout", "debug")


def flag_name(key: str) -> str:
    return "--" + key.replace("_", "-")


def load_settings(
    *,
    flags: Mapping[str, str],
    env: Mapping[str, str] | None = None,
    config: str | None = None,
    base: Settings | None = None,
) -> Settings:
    """`flags` holds what was given on the command line, by field name. `env` None: the process's.

    Raises ConfigError naming the flag, variable or key at fault.
    """
    variables = _from_env(os.environ if env is None else env)
    path = config or variables.pop("config", None)
    settings = base or Settings()
    if path:
        settings = _apply(settings, _from_file(path), lambda key: f"{path}: {key}")
    settings = _apply(settings, variables, lambda key: ENV_PREFIX + key.upper())
    return _apply(settings, flags, flag_name)


def _apply(settings: Settings, values: Mapping[str, str], source: Callable[[str], str]) -> Settings:
    parsed: dict[str, object] = {}
    for key, text in values.items():
        if key not in SETTINGS:
            raise ConfigError(f"{source(key)}: there is no such setting{nearest(key)}")
        try:
            parsed[key] = SETTINGS[key].parse(text)
        except ValueError as error:
            raise ConfigError(f"{source(key)}: {error}") from None
    return replace(settings, **parsed)  # type: ignore[arg-type]  # each parser returns its field's


def nearest(key: str, spell: Callable[[str], str] = str) -> str:
    """A hint for a mistyped setting, empty when none is near."""
    matches = difflib.get_close_matches(key, SETTINGS)
    return f" (did you mean {spell(matches[0])}?)" if matches else ""


def _from_env(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(ENV_PREFIX).lower(): text
        for name, text in sorted(env.items())
        if name.startswith(ENV_PREFIX)
    }


def _from_file(path: str) -> dict[str, str]:
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (UnicodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: not readable as YAML: {reason}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, found a {type(tree).__name__}")
    for key, value in tree.items():
        if isinstance(value, (dict, list)):
            raise ConfigError(f"{path}: {key}: expected one value, found a {type(value).__name__}")
    return {str(key): str(value) for key, value in tree.items() if value is not None}


def state_folder(env: Mapping[str, str] | None = None) -> Path:
    """Where `up` notes what it started and keeps its logs, by the XDG rules."""
    variables = os.environ if env is None else env
    base = variables.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "twostroke"


def kernel_cache(env: Mapping[str, str] | None = None) -> str | None:
    """Folder of built CPU kernels where XDG_CACHE_HOME says so; None: the usual one."""
    variables = os.environ if env is None else env
    base = variables.get("XDG_CACHE_HOME")
    return str(Path(base) / "twostroke" / "kernels") if base else None


def share_of_cores(num_ranks: int) -> int:
    """Threads for each of `num_ranks` ranks on this machine. More than its share only makes them
    wait for each other."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def full_speed_tokens(device: str) -> int | None:
    """How many prompt tokens a step needs to read them at full speed, as far as is known. A CPU
    reads 64 tokens at 95 % of its best rate (docs/performance.md)."""
    return 64 if device == "cpu" else None


def engine_config(settings: Settings, model: ResolvedModel, num_ranks: int = 1) -> EngineConfig:
    """Of one rank; `num_ranks` share this machine."""
    return EngineConfig(
        model_path=model.path,
        dtype=settings.dtype,
        quantization=settings.quantization,
        device=settings.device,
        kernels=settings.kernels,
        kernel_cache=kernel_cache(),
        num_threads=settings.threads or share_of_cores(num_ranks),
        max_model_len=settings.max_model_len,
        cache=CacheConfig(
            block_size=settings.block_size,
            memory_bytes=settings.kv_memory,
            dtype=settings.kv_cache_dtype,
            enable_prefix_caching=not settings.no_prefix_cache,
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=settings.max_num_batched_tokens,
            prefill_step_tokens=settings.prefill_step_tokens or full_speed_tokens(settings.device),
            max_num_seqs=settings.max_num_seqs,
        ),
    )


def transfer_config(settings: Settings) -> TransferConfig:
    return TransferConfig(
        backend="nccl" if settings.device.startswith("cuda") else "gloo",
        verify_checksum=settings.verify_checksum,
    )


def router_config(settings: Settings, model: ResolvedModel) -> RouterConfig:
    return RouterConfig(
        served_model_name=settings.served_model_name or model.served_name,
        model_path=model.path,
        host=settings.host,
        port=settings.port,
        request_timeout_s=settings.request_timeout,
        enable_debug=settings.debug,
    )


def cluster_config(settings: Settings, model: ResolvedModel) -> ClusterConfig:
    """Raises ConfigError when colocated workers and others are asked for."""
    none = WorkerPool(count=0)
    pools = {role: getattr(settings, role) or none for role in WorkerRole}
    needed = needed_roles([role for role, pool in pools.items() if pool.count])
    pools |= {role: WorkerPool() for role in needed if not pools[role].count}
    num_ranks = sum(pool.num_ranks for pool in pools.values())
    return ClusterConfig(
        router=router_config(settings, model),
        engine=engine_config(settings, model, num_ranks),
        transfer=transfer_config(settings),
        **{role.value: pool for role, pool in pools.items()},
    )


def worker_config(
    settings: Settings, model: ResolvedModel, *, role: WorkerRole, name: str | None = None
) -> WorkerConfig:
    """One worker that an operator, or Kubernetes, starts by hand. Unnamed, it is called by its
    address, or, where the port is not known yet, by chance: two are never called the same.

    Raises ConfigError when nobody could dial what it would advertise.
    """
    advertised = settings.advertise_host or settings.host
    if _is_wildcard(advertised):
        raise ConfigError(
            f"{advertised} is no address that others can dial: name this worker's own with"
            " --advertise-host"
        )
    return WorkerConfig(
        name=name or _worker_name(role, advertised, settings.port),
        role=role,
        served_model_name=settings.served_model_name or model.served_name,
        engine=replace(
            engine_config(settings, model, settings.parallel.world_size),
            parallel=settings.parallel,
        ),
        transfer=transfer_config(settings),
        host=settings.host,
        port=settings.port,
        advertise_host=settings.advertise_host or "",
    )


def _worker_name(role: WorkerRole, host: str, port: int) -> str:
    return f"{role}-{endpoint(host, port)}" if port else f"{role}-{secrets.token_hex(3)}"


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "0"  # sockets read it as 0.0.0.0


def parse_endpoints(texts: Iterable[str], flag: str) -> tuple[str, ...]:
    """`host:port` or `[ipv6]:port`, repeated or separated by commas. Raises ConfigError."""
    endpoints = tuple(part for text in texts for part in text.split(",") if part)
    for given in endpoints:
        host, _, port = given.rpartition(":")
        bare_ipv6 = ":" in host and not re.fullmatch(r"\[.+\]", host)
        if not host or bare_ipv6 or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"{flag}: {given!r} is not host:port")
    return endpoints
