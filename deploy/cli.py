"""The command `twostroke`: reads the command line and hands over to one module per command.

Those modules are imported by the command that needs them: `router` runs in an image without torch,
`prefill` and `decode` without an HTTP stack, and `--help` should not wait for any of them.
Whatever the operator got wrong is told in one line, with exit code 2; --debug shows the traceback.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from core.errors import ConfigError, TwostrokeError
from core.worker import WorkerInfo, WorkerRole
from deploy.config_file import (
    ENGINE_SETTINGS,
    ROUTER_SETTINGS,
    SETTINGS,
    Settings,
    flag_name,
    load_settings,
    parse_endpoints,
    router_config,
    state_folder,
    worker_config,
)
from deploy.model_source import resolve_model

DEFAULT_URL = "http://127.0.0.1:8000"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

OVERVIEW = """\
Twostroke serves language models in two strokes: prefill workers read prompts, decode
workers write answers, and a router speaks the OpenAI API in front of them.
"""

START = """\
start here:
  twostroke demo                       a cluster, one question, and where the time went
  twostroke up                         serve the bundled model on http://127.0.0.1:8000/v1
  twostroke chat                       talk to it (from another terminal)
  twostroke status                     its workers, their load and KV use
  twostroke down                       stop what `up` started

`twostroke COMMAND --help` explains a command.
"""

UP_EXAMPLES = """\
examples:
  twostroke up                                     the bundled SmolLM2-135M-Instruct
  twostroke up ./Qwen3-0.6B-Q8_0.gguf --decode 2   a GGUF file, two decode workers
  twostroke up ~/models/Llama-3.2-1B --dtype bfloat16
  twostroke up Qwen/Qwen3-0.6B                     from the Hugging Face hub
  twostroke up --detach && twostroke chat          in the background
  twostroke up --config cluster.yaml               settings from a file

Every option can also stand in the file (block_size: 32) or in the environment
(TWOSTROKE_BLOCK_SIZE=32). Options win over variables, variables over the file.
"""

CHAT_EXAMPLES = """\
examples:
  twostroke chat                                   a conversation
  twostroke chat -v "Why is the sky blue?"         one answer, and where its time went
  twostroke chat --system "Answer in one word." --url http://10.0.0.5:8000
"""

PROCESS_EXAMPLES = """\
A cluster by hand, on one machine or several (Kubernetes does the same):
  twostroke prefill --host 10.0.0.1 --port 5001
  twostroke decode  --host 10.0.0.2 --port 5002
  twostroke router  --prefill 10.0.0.1:5001 --decode 10.0.0.2:5002 --port 8000
Once it serves, a process prints one line of JSON that says where.
"""


class Parser(argparse.ArgumentParser):
    """Errors in one line; no guessing at shortened options."""

    def __init__(self, **options: Any) -> None:
        options |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser() -> Parser:
    parser = Parser(prog="twostroke", description=OVERVIEW, epilog=START)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_up(commands)
    _add_demo(commands)
    _add_chat(commands)
    _add_status(commands)
    _add_down(commands)
    _add_processes(commands)
    return parser


Commands = argparse._SubParsersAction  # argparse has no public name for it


def _command(
    commands: Commands[Parser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    epilog: str = "",
) -> Parser:
    command = commands.add_parser(name, help=summary, description=summary, epilog=epilog)
    command.set_defaults(run=run)
    return command


def _add_settings(parser: Parser, keys: Iterable[str]) -> None:
    """Options for `keys`, as text: config_file parses them, like variables and files."""
    group = parser.add_argument_group("settings")
    for key in keys:
        setting = SETTINGS[key]
        if key == "debug":
            group.add_argument(
                "--debug", action="store_const", const="true", help=f"{setting.help}; tracebacks"
            )
        elif key == "model":
            group.add_argument("model_argument", nargs="?", metavar="MODEL", help=setting.help)
            group.add_argument("--model", metavar="MODEL", help="the same, as an option")
        else:
            group.add_argument(flag_name(key), metavar=setting.metavar, help=setting.help)
    group.add_argument("--config", metavar="FILE", help="YAML file with settings")


def _add_debug(parser: Parser) -> None:
    parser.add_argument("--debug", action="store_const", const="true", help="show tracebacks")


def _add_up(commands: Commands[Parser]) -> None:
    up = _command(commands, "up", _up, "start a cluster on this machine", UP_EXAMPLES)
    up.add_argument("--detach", action="store_true", help="return once it serves")
    up.add_argument("--no-ray", action="store_true", help="everything in one process, without Ray")
    _add_settings(up, SETTINGS)


def _add_demo(commands: Commands[Parser]) -> None:
    demo = _command(
        commands, "demo", _demo, "start a cluster, ask it a question, show where the time went"
    )
    stay = demo.add_mutually_exclusive_group()
    stay.add_argument("--stay", action="store_true", help="serve on until Ctrl-C, then stop")
    stay.add_argument(
        "--once", action="store_true", help="stop after the answer (default without a terminal)"
    )
    demo.add_argument("--no-ray", action="store_true", help="everything in one process")
    _add_settings(demo, SETTINGS)


def _add_chat(commands: Commands[Parser]) -> None:
    chat = _command(commands, "chat", _chat, "talk to a cluster", CHAT_EXAMPLES)
    chat.add_argument("question", nargs="?", help="ask only this, then leave")
    chat.add_argument("--url", help="of the router (default: the cluster that runs here)")
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="longest answer, in tokens")
    chat.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest")
    chat.add_argument(
        "-v", "--verbose", action="store_true", help="show a timeline after each answer"
    )
    _add_debug(chat)


def _add_status(commands: Commands[Parser]) -> None:
    status = _command(commands, "status", _status, "show workers, their load and KV use")
    status.add_argument("--url", help="of the router (default: the cluster that runs here)")
    status.add_argument("--json", action="store_true", help="as JSON, for scripts")
    _add_debug(status)


def _add_down(commands: Commands[Parser]) -> None:
    down = _command(commands, "down", _down, "stop what `twostroke up` started here")
    down.add_argument("--port", type=int, metavar="PORT", help="only the cluster on this port")
    _add_debug(down)


def _add_processes(commands: Commands[Parser]) -> None:
    router = _command(commands, "router", _router, "run one router process", PROCESS_EXAMPLES)
    for role in WorkerRole:
        router.add_argument(
            f"--{role}", action="append", metavar="HOST:PORT", help=f"a {role} worker; repeatable"
        )
    _add_settings(router, ROUTER_SETTINGS)
    for role in WorkerRole:
        worker = _command(
            commands, role.value, _worker, f"run one {role} worker process", PROCESS_EXAMPLES
        )
        worker.set_defaults(role=role)
        worker.add_argument("--name", help=f"unique in the cluster (default {role}-0)")
        _add_settings(worker, (*ENGINE_SETTINGS, "host", "port"))
        _add_debug(worker)


def _given(args: argparse.Namespace) -> dict[str, str]:
    """The settings on the command line. Raises ConfigError for two models."""
    given = {key: getattr(args, key, None) for key in SETTINGS}
    if args.model_argument is not None:
        if args.model is not None:
            raise ConfigError("the model is named twice, as an argument and with --model")
        given["model"] = args.model_argument
    return {key: text for key, text in given.items() if text is not None}


def _settings(args: argparse.Namespace, base: Settings | None = None) -> Settings:
    return load_settings(flags=_given(args), config=args.config, base=base)


def _up(args: argparse.Namespace) -> int:
    from deploy.state_file import Records
    from deploy.up import detach, up

    settings, records = _settings(args), Records(state_folder() / "clusters")
    if args.detach:
        again = [word for word in args.argv[1:] if word != "--detach"]
        return detach(again, settings, records=records, logs=state_folder() / "logs")
    return up(settings, use_ray=not args.no_ray, records=records)


def _demo(args: argparse.Namespace) -> int:
    from deploy.demo import demo

    stay = args.stay or (sys.stdin.isatty() and not args.once)
    return demo(
        _settings(args), stay=stay, use_ray=not args.no_ray, port_given=args.port is not None
    )


def _chat(args: argparse.Namespace) -> int:
    from deploy.api_client import ApiClient
    from deploy.chat import ChatOptions, ask_once, converse

    options = ChatOptions(
        system=args.system,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        verbose=args.verbose,
    )
    client = ApiClient(args.url or _running_url())
    if args.question is not None:
        return ask_once(client, args.question, options)
    return converse(client, options)


def _status(args: argparse.Namespace) -> int:
    from deploy.api_client import ApiClient
    from deploy.status import show_status

    return show_status(ApiClient(args.url or _running_url()), as_json=args.json)


def _running_url() -> str:
    """The newest cluster that `up` has running here; the usual address when there is none."""
    from deploy.state_file import Records

    records = Records(state_folder() / "clusters").all()
    return records[-1].url if records else DEFAULT_URL


def _down(args: argparse.Namespace) -> int:
    from deploy.state_file import Records, stop
    from deploy.up import choose

    records = Records(state_folder() / "clusters")
    chosen = choose(records.all(), args.port)
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
    missing = set(WorkerRole) - {endpoint.role for endpoint in endpoints}
    if missing:
        raise ConfigError(f"no {min(missing)} worker: name one with --{min(missing)} HOST:PORT")
    args.prefill = args.decode = None  # here they were addresses, not the counts of settings
    settings = _settings(args)
    config = router_config(settings, resolve_model(settings.model))

    async def serve() -> int:
        await serve_router(config, endpoints, lambda url: _announce(role="router", url=url))
        return 0

    return run_until_stopped(serve)


def _worker(args: argparse.Namespace) -> int:
    from deploy.signals import run_until_stopped
    from deploy.workers import serve_worker

    settings = _settings(args, base=Settings(port=0))
    config = worker_config(
        settings,
        resolve_model(settings.model),
        role=args.role,
        name=args.name or f"{args.role}-0",
    )

    def ready(info: WorkerInfo) -> None:
        identity = asdict(info.worker_id)
        _announce(role=info.role.value, address=info.address, pid=info.pid, **identity)

    async def serve() -> int:
        await serve_worker(config, ready)
        return 1  # a worker that ends by itself has failed

    return run_until_stopped(serve)


def _announce(**facts: object) -> None:
    print(json.dumps({"event": "ready", **facts}), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    args = build_parser().parse_args(argv)
    args.argv = argv
    logging.basicConfig(level=logging.INFO if args.debug else logging.WARNING, format=LOG_FORMAT)
    try:
        code: int = args.run(args)
        return code
    except TwostrokeError as error:
        if args.debug:
            raise
        print(f"twostroke {args.command}: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
