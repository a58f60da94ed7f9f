"""`twostroke demo`: bring a cluster up, ask it something, show where the time went."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import replace

from core.config import ClusterConfig
from core.errors import ConfigError
from deploy.api_client import ApiClient, Message
from deploy.chat import ChatOptions, show_timeline, stream_answer
from deploy.cluster import check_port
from deploy.config_file import Settings
from deploy.console import ClusterView
from deploy.signals import run_until_stopped
from deploy.up import Backend, describe, make_cluster, prepare

QUESTION = "What is the capital of France, and what is it known for? Answer in two sentences."
STOPPED = "Everything is stopped."
OPTIONS = ChatOptions(max_tokens=96, temperature=0.0, verbose=True)


def demo(settings: Settings, *, stay: bool, backend: Backend, port_given: bool) -> int:
    """With `stay`, the cluster serves until Ctrl-C; otherwise it is stopped after one answer."""
    if not port_given:
        settings = replace(settings, port=_free_port(settings))
        if settings.port == 0:
            _say(f"port {Settings().port} is taken; any free one will do (--port: another)")
    config = prepare(settings)
    return run_until_stopped(lambda: _demo(config, stay=stay, backend=backend), interrupted=130)


def _free_port(settings: Settings) -> int:
    """The usual port, or any: a demo should not fail for that."""
    try:
        check_port(settings.host, settings.port)
    except ConfigError:
        return 0
    return settings.port


async def _demo(config: ClusterConfig, *, stay: bool, backend: Backend) -> int:
    with ClusterView() as view:
        view.note(f"{config.router.served_model_name} on {describe(config)}")
        async with make_cluster(config, view, backend) as cluster:
            view.note(f"the cluster serves {cluster.url}/v1")
            # In a thread: the client blocks, and the router shares this event loop.
            await asyncio.to_thread(_ask, cluster.url)
            if stay:
                _say(_curl(cluster.url, config.router.served_model_name))
                _say(f"Or talk to it: twostroke chat --url {cluster.url}   (Ctrl-C stops it all)")
                with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C is its normal end
                    await cluster.wait()
    _say(STOPPED if stay else f"\n{STOPPED} To keep a cluster: twostroke up")
    return 0


def _ask(url: str) -> None:
    client = ApiClient(url)
    try:
        _say(f"\nYou: {QUESTION}\n")
        answer = stream_answer(client, [Message(role="user", content=QUESTION)], OPTIONS)
        _say("\nWhere the time went:")
        show_timeline(client, answer.request_id)
    finally:
        client.close()


def _curl(url: str, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "stream": True,
    }
    return (
        f"\nTry next:\n  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'"
        f" \\\n    -d '{json.dumps(body)}'\n"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
