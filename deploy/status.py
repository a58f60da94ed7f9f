"""`twostroke status`: the router's view of its workers, as a table or as JSON."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from deploy.api_client import ApiClient, Json
from deploy.timeline import size

COLUMNS = (
    "worker",
    "role",
    "state",
    "waiting",
    "running",
    "KV used",
    "cached",
    "memory",
    "address",
)


def show_status(client: ApiClient, *, as_json: bool) -> int:
    """On standard output."""
    tree = client.cluster()
    if as_json:
        print(json.dumps(tree, indent=2))
        return 0
    table = Table(*COLUMNS, box=None, header_style="bold", pad_edge=False)
    for worker in tree["workers"]:
        table.add_row(*row(worker))
    console = Console(highlight=False)
    console.print(f"{tree['model']} at {client.url}", markup=False)
    console.print(table)
    return 0


def row(worker: Json) -> tuple[str, ...]:
    """One worker, in the order of COLUMNS. What a worker has not told yet is a dash."""
    return (
        _text(worker["name"]),
        str(worker["role"]),
        _state(worker),
        _text(worker["num_waiting"]),
        _text(worker["num_running"]),
        _kv_use(worker),
        _text(worker["num_cached_blocks"]),
        size(worker["rss_bytes"]) if worker["rss_bytes"] else "-",
        str(worker["address"]),
    )


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _state(worker: Json) -> str:
    if not worker["connected"]:
        return "unreachable"
    return "suspect" if worker["suspect"] else "serving"


def _kv_use(worker: Json) -> str:
    if worker["num_blocks"] is None:
        return "-"
    used = worker["num_blocks"] - worker["num_free_blocks"]
    return f"{used}/{worker['num_blocks']} blocks ({worker['kv_usage']:.0%})"
