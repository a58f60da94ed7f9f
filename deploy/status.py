"""`twostroke status`: the router's view of its workers, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from deploy.api_client import ApiClient, Json
from deploy.timeline import counted, size

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
    in_flight = counted(tree["requests_in_flight"], "request")
    print(f"{tree['model']} at {client.url}, {in_flight} in flight")
    workers = sorted(tree["workers"], key=lambda w: (w["role"] != "prefill", str(w["name"])))
    print(aligned([COLUMNS, *(row(worker) for worker in workers)]))
    return 0


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; never wrapped, so that lines can be grepped."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in rows
    )


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
    return f"{used}/{counted(worker['num_blocks'], 'block')} ({worker['kv_usage']:.0%})"
