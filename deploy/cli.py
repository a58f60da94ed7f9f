"""The command `twostroke`: hands over to one module per command.

Those modules are imported by the command that needs them: `router` runs in an image without torch,
the workers without an HTTP stack, and neither `--help` nor a mistyped option should wait
for any of them.
Whatever the operator got wrong is told in one line, with exit code 2; --debug shows the traceback.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict

from core.errors import ConfigError, TwostrokeError
from core.worker import WorkerInfo, WorkerRole, needed_roles
from deploy.arguments import given_settings, parse
from deploy.config_file import (
    Settings,
    kernel_cache,
    load_settings,
    parse_endpoints,
    router_config,
    state_folder,
    worker_config,
)
from deploy.logs import ProgressLines, configure_logging
from deploy.model_source import resolve_model

DEFAULT_URL = "http://127.0.0.1:8000"
DEMO_KV_BYTES = 256 << 20
"""Enough for one question; touching a gigabyte for the first time takes seconds on some VMs."""


def _settings(args: argparse.Namespace, base: Settings | None = None) -> Settings:
    return load_settings(flags=given_settings(args), config=args.config, base=base)


def _up(args: argparse.Namespace) -> int:
    settings = _settings(args)

    from deploy.state_file import Records
    from deploy.up import Backend, detach, up

    records = Records(state_folder() / "clusters")
    if args.detach:
        again = [word for word in args.argv[1:] if word != "--detach"]
        return detach(again, settings, records=records, logs=state_folder() / "logs")
    return up(settings, backend=Backend(settings.backend), records=records)


def _demo(args: argparse.Namespace) -> int:
    settings = _settings(args, base=Settings(kv_memory=DEMO_KV_BYTES, debug=True))

    from deploy.demo import demo
    from deploy.up import Backend

    stay = args.stay or (sys.stdin.isatty() and not args.once)
    port_given = args.port is not None or settings.port != Settings().port
    return demo(settings, stay=stay, backend=Backend(settings.backend), port_given=port_given)


def _chat(args: argparse.Namespace) -> int:
    from deploy.api_client import ApiClient
    from deploy.chat import ChatOptions, ask_once, converse

    options = ChatOptions(
        system=args.system,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        verbose=args.verbose,
    )
    with closing(ApiClient(args.url or _running_url())) as client:
        if args.question is not None:
            return ask_once(client, args.question, options)
        return converse(client, options)


def _status(args: argparse.Namespace) -> int:
    from deploy.api_client import ApiClient
    from deploy.status import show_status

    with closing(ApiClient(args.url or _running_url())) as client:
        return show_status(client, as_json=args.json)


def _running_url() -> str:
    """The newest cluster that `up` has running here; the usual address when there is none. Says
    which one it took of several."""
    from deploy.state_file import Records, several

    records = Records(state_folder() / "clusters").all()
    if len(records) > 1:
        print(f"{several(records)}; taking {records[-1].url} (--url: another)", file=sys.stderr)
    return records[-1].url if records else DEFAULT_URL


def _down(args: argparse.Namespace) -> int:
    from deploy.state_file import Records, choose, stop

    records = Records(state_folder() / "clusters")
    chosen = choose(records.all(), args.port, every=args.all)
    if not chosen:
        print("nothing is running")
    for record in chosen:
        clean = stop(record)
        records.remove(record.pid)
        print(f"stopped {record.model} at {record.url}" + ("" if clean else " (had to be killed)"))
    return 0


def _router(args: argparse.Namespace) -> int:
    from deploy.router_process import serve_router
    from deploy.signals import run_until_stopped
    from router.server import WorkerEndpoint

    endpoints = [
        WorkerEndpoint(role=role, address=address)
        for role in WorkerRole
        for address in parse_endpoints(getattr(args, role) or [], f"--{role}")
    ]
    given = {endpoint.role for endpoint in endpoints}
    missing = set(needed_roles(given)) - given
    if missing:
        raise ConfigError(f"no {min(missing)} worker: name one with --{min(missing)} HOST:PORT")
    for role in WorkerRole:  # here they were addresses, not the counts of settings
        setattr(args, role, None)
    settings = _settings(args)
    config = router_config(settings, resolve_model(settings.model))

    async def serve() -> int:
        await serve_router(config, endpoints, lambda url: _announce(role="router", url=url))
        return 0

    return run_until_stopped(serve)


def _worker(args: argparse.Namespace) -> int:
    settings = _settings(args, base=Settings(port=0))

    from deploy.signals import run_until_stopped
    from deploy.workers import serve_worker

    config = worker_config(
        settings,
        resolve_model(settings.model),
        role=args.role,
        name=args.name,
    )
    progress = ProgressLines(config.name)

    def ready(info: WorkerInfo) -> None:
        identity = asdict(info.worker_id)
        _announce(role=info.role.value, address=info.address, pid=info.pid, **identity)

    async def serve() -> int:
        await serve_worker(config, ready, progress)
        return 1  # a worker that ends by itself has failed

    return run_until_stopped(serve)


def _build_kernels(args: argparse.Namespace) -> int:
    from cpu_kernels.build import build_ahead

    build_ahead(args.level, cache=kernel_cache(), note=print)
    return 0


def _announce(**facts: object) -> None:
    print(json.dumps({"event": "ready", **facts}), flush=True)


HANDLERS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "up": _up,
    "demo": _demo,
    "chat": _chat,
    "status": _status,
    "down": _down,
    "router": _router,
    **dict.fromkeys(WorkerRole, _worker),
    "build-kernels": _build_kernels,
}


def main(arguments: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    args = parse(argv)
    configure_logging(logging.INFO if args.debug else logging.WARNING)
    if args.command == "router":  # nobody else tells which workers it has
        logging.getLogger("deploy").setLevel(logging.INFO)
    try:
        return HANDLERS[args.command](args)
    except TwostrokeError as error:
        if args.debug:
            raise
        print(f"twostroke {args.command}: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
