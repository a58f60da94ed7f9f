"""What the command line looks like: commands, options, help. Runs nothing.

Settings stay text here; deploy.config_file parses them, like variables and files. Errors are one
line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn

from core.errors import ConfigError
from core.worker import WorkerRole
from cpu_kernels.cpu_level import CpuLevel
from deploy.config_file import (
    ROUTER_SETTINGS,
    SETTINGS,
    UP_SETTINGS,
    WORKER_SETTINGS,
    flag_name,
    nearest,
)

URL_HELP = "of the router (default: the newest cluster that `up` runs here)"

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
  twostroke up --backend local --colocated         one worker for both strokes: a small machine
  twostroke up --detach && twostroke chat          in the background
  twostroke up --config cluster.yaml               settings from a file

All settings can also stand in the file (block_size: 32) or in the environment
(TWOSTROKE_BLOCK_SIZE=32); --config has only a variable, --detach and --no-ray neither. Options win
over variables, variables over the file.
"""

CHAT_EXAMPLES = """\
examples:
  twostroke chat                                   a conversation
  twostroke chat -v "Why is the sky blue?"         one answer, and where its time went
  twostroke chat --system "Answer in one word." --url http://10.0.0.5:8000
"""

DOWN_NOTE = """\
Where several clusters run, it must be said which: --port or --all.
"""

PROCESS_EXAMPLES = """\
A cluster by hand, on one machine or several (Kubernetes does the same):
  twostroke prefill --host 10.0.0.1 --port 5001
  twostroke decode  --host 10.0.0.2 --port 5002
  twostroke router  --prefill 10.0.0.1:5001 --decode 10.0.0.2:5002 --port 8000
Or workers that do both strokes: twostroke colocated, and the router's --colocated HOST:PORT.
Once it serves, a process prints one line of JSON that says where. A worker that listens
everywhere (--host 0.0.0.0) is told its own address with --advertise-host.
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
    _add_build_kernels(commands)
    return parser


Commands = argparse._SubParsersAction  # argparse has no public name for it


def _command(commands: Commands[Parser], name: str, summary: str, epilog: str = "") -> Parser:
    command = commands.add_parser(name, help=summary, description=summary, epilog=epilog)
    command.set_defaults(parser=command)
    return command


def _add_settings(parser: Parser, keys: Iterable[str]) -> None:
    """Options for `keys`, as text: config_file parses them, like variables and files."""
    group = parser.add_argument_group("settings")
    for key in keys:
        setting = SETTINGS[key]
        if setting.is_switch:
            also = "; tracebacks" if key == "debug" else ""
            group.add_argument(
                flag_name(key), action="store_const", const="true", help=setting.help + also
            )
        elif key == "backend":
            _add_backend(group)
        elif key == "model":
            group.add_argument("model_argument", nargs="?", metavar="MODEL", help=setting.help)
            group.add_argument("--model", metavar="MODEL", help="the same, as an option")
        elif setting.implied is not None:
            group.add_argument(
                flag_name(key), metavar=setting.metavar, help=setting.help,
                nargs="?", const=setting.implied,
            )  # fmt: skip
        else:
            group.add_argument(flag_name(key), metavar=setting.metavar, help=setting.help)
    group.add_argument("--config", metavar="FILE", help="YAML file with settings")


def _add_backend(group: argparse._ArgumentGroup) -> None:
    choice = group.add_mutually_exclusive_group()
    setting = SETTINGS["backend"]
    choice.add_argument("--backend", metavar=setting.metavar, help=setting.help)
    choice.add_argument(
        "--no-ray", dest="backend", action="store_const", const="local", help="--backend local"
    )


def _add_debug(parser: Parser) -> None:
    parser.add_argument("--debug", action="store_const", const="true", help="show tracebacks")


def _add_up(commands: Commands[Parser]) -> None:
    up = _command(commands, "up", "start a cluster on this machine", UP_EXAMPLES)
    up.add_argument("--detach", action="store_true", help="return once it serves")
    _add_settings(up, UP_SETTINGS)


def _add_demo(commands: Commands[Parser]) -> None:
    demo = _command(
        commands, "demo", "start a cluster, ask it a question, show where the time went"
    )
    stay = demo.add_mutually_exclusive_group()
    stay.add_argument("--stay", action="store_true", help="serve on until Ctrl-C, then stop")
    stay.add_argument(
        "--once", action="store_true", help="stop after the answer (default without a terminal)"
    )
    _add_settings(demo, UP_SETTINGS)


def _add_chat(commands: Commands[Parser]) -> None:
    chat = _command(commands, "chat", "talk to a cluster", CHAT_EXAMPLES)
    chat.add_argument("question", nargs="?", help="ask only this, then leave")
    chat.add_argument("--url", help=URL_HELP)
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    chat.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="longest answer (default 512)"
    )
    chat.add_argument(
        "--temperature", type=float, default=0.7, metavar="T",
        help="0 always takes the likeliest token (default 0.7)",
    )  # fmt: skip
    chat.add_argument(
        "-v", "--verbose", action="store_true", help="show a timeline after each answer"
    )
    _add_debug(chat)


def _add_status(commands: Commands[Parser]) -> None:
    status = _command(commands, "status", "show workers, their load and KV use")
    status.add_argument("--url", help=URL_HELP)
    status.add_argument("--json", action="store_true", help="as JSON, for scripts")
    _add_debug(status)


def _add_down(commands: Commands[Parser]) -> None:
    down = _command(commands, "down", "stop what `twostroke up` started here", DOWN_NOTE)
    which = down.add_mutually_exclusive_group()
    which.add_argument("--port", type=int, metavar="PORT", help="the cluster on this port")
    which.add_argument("--all", action="store_true", help="all of them")
    _add_debug(down)


def _add_processes(commands: Commands[Parser]) -> None:
    router = _command(commands, "router", "run one router process", PROCESS_EXAMPLES)
    for role in WorkerRole:
        router.add_argument(
            f"--{role}", action="append", metavar="HOST:PORT", help=f"a {role} worker; repeatable"
        )
    _add_settings(router, ROUTER_SETTINGS)
    for role in WorkerRole:
        worker = _command(commands, role.value, f"run one {role} worker process", PROCESS_EXAMPLES)
        worker.set_defaults(role=role)
        worker.add_argument("--name", help="unique in the cluster (default: from its address)")
        _add_settings(worker, WORKER_SETTINGS)
        _add_debug(worker)


def _add_build_kernels(commands: Commands[Parser]) -> None:
    build = _command(
        commands,
        "build-kernels",
        "build the CPU kernels ahead, for images that hold no compiler",
    )
    build.add_argument(
        "--level", choices=[*CpuLevel, "all"], help="default: the best of this machine's CPU"
    )
    _add_debug(build)


def parse(argv: list[str]) -> argparse.Namespace:
    """`command`, its options, and `argv` as it was given. Exits with code 2 for a mistake."""
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        name = unknown[0].lstrip("-").partition("=")[0].replace("-", "_")
        args.parser.error(f"unrecognized argument: {unknown[0]}{nearest(name, flag_name)}")
    args.argv = argv
    return args


def given_settings(args: argparse.Namespace) -> dict[str, str]:
    """The settings on the command line. Raises ConfigError for two models."""
    given = {key: getattr(args, key, None) for key in SETTINGS}
    if args.model_argument is not None:
        if args.model is not None:
            raise ConfigError("the model is named twice, as an argument and with --model")
        given["model"] = args.model_argument
    return {key: text for key, text in given.items() if text is not None}
