"""How fast KV moves between workers, and what several ranks cost a step, each beside its limit.

    python benchmarks/transfer.py --out benchmarks/results/transfer.json

No HTTP, no scheduler; transfers need no model either. Four parts (`--parts`):

bandwidth   pulls of equal shapes by size, from another process (gRPC and gloo, the real path) and
            within this one (loopback transport), in turn with what bounds them: a memcpy of as many
            bytes, a TCP stream and bare gloo sends of messages as large, and what each end does
            beside (gather, scatter). Then messages of other sizes.
shapes      pulls between unequal shapes. All ranks of a side share its process, so this shows what
            cutting and converting costs, not what more cores would gain.
handover    one block of few bytes from `start` to PullDone, over an open channel and as the first
            contact of two workers.
steps       steps of one model on one and on two ranks, and their messages alone.

Everything has one thread per process. A time is the median of the repeats, with the lowest and the
highest; shares of a limit are of the lowest ones, which others on the machine spoil least. How many
cores others used meanwhile is noted. Writes tables (.md) beside the JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loads import busy_seconds
from benchmarks.rank_steps import (
    NUM_REDUCES,
    SHAPES,
    STEPS,
    Step,
    StepMessages,
    open_messages,
    running,
    write_model,
)
from benchmarks.serve import machine
from benchmarks.step_curves import say
from benchmarks.transfer_ends import (
    Owner,
    Reader,
    Shape,
    Wires,
    far_owner,
    near_owner,
    new_pool,
    open_wires,
    scattered,
)
from core.config import TransferConfig
from core.kv import KVLayout
from engine.executor import Executor
from kv_transfer.pack import StagingBuffer, gather, scatter
from kv_transfer.plan import plan_messages
from kv_transfer.receiver import PeerClient

MIB = 1 << 20
SIZES = (1, 8, 32, 128, 512, 2048)
"""Blocks of 16."""
MESSAGE_MIB = (1, 2, 4, 8, 16, 32, 64)
SWEPT = (128, 2048)
"""Sizes pulled in messages of all MESSAGE_MIB."""
PAIRS: Mapping[str, tuple[Shape, Shape]] = {
    name: (Shape(**source, num_kv_heads=4), Shape(**target, num_kv_heads=4))
    for name, source, target in (
        ("equal", {}, {}),
        ("tp2 to tp1", {"tp": 2}, {}),
        ("tp1 to tp2", {}, {"tp": 2}),
        ("pp2 to tp2", {"pp": 2}, {"tp": 2}),
        ("blocks of 16 to 64", {}, {"block_size": 64}),
        ("blocks of 64 to 16", {"block_size": 64}, {}),
        ("bfloat16 to int8", {}, {"dtype": "int8"}),
        ("equal, int8", {"dtype": "int8"}, {"dtype": "int8"}),
    )
}
"""Four kv heads, for SmolLM2's three cannot be halved."""
SHAPE_BLOCKS = 128
"""Of 16. Cut in two, one message: a loopback transport waits 0.2 s for a receive to be posted, and
a reader takes pieces one after another."""
SMALL = Shape(num_layers=1, num_kv_heads=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One thing measured. Milliseconds."""

    part: str
    name: str
    case: str
    num_bytes: int | None
    median_ms: float
    lowest_ms: float
    highest_ms: float
    repeats: int

    @property
    def gib_s(self) -> float:
        """Of the lowest time."""
        assert self.num_bytes is not None, self
        return self.num_bytes / (1 << 30) / (self.lowest_ms / 1e3)


class Notes:
    """All points, and how busy others were in each part."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.other_cores: dict[str, float] = {}

    def add(
        self,
        part: str,
        name: str,
        case: str,
        seconds: Sequence[float],
        num_bytes: int | None = None,
    ) -> None:
        lowest, middle, highest = (
            round(1e3 * value, 4)
            for value in (min(seconds), statistics.median(seconds), max(seconds))
        )
        point = Point(
            part=part,
            name=name,
            case=case,
            num_bytes=num_bytes,
            median_ms=middle,
            lowest_ms=lowest,
            highest_ms=highest,
            repeats=len(seconds),
        )
        rate = f", {point.gib_s:.2f} GiB/s" if num_bytes else ""
        say(f"  {case}, {name}: {middle} ms ({lowest} to {highest}){rate}")
        self.points.append(point)

    def of(self, part: str) -> dict[tuple[str, str], Point]:
        """(case, name) -> point."""
        return {(point.case, point.name): point for point in self.points if point.part == part}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        say(name)
        started, before = time.perf_counter(), busy_seconds() - _own_seconds()
        yield
        seconds = time.perf_counter() - started
        others = (busy_seconds() - _own_seconds() - before) / seconds
        self.other_cores[name] = round(max(0.0, others), 2)
        say(f"  {seconds:.0f} s, others used {self.other_cores[name]} cores")


def _own_seconds() -> float:
    """Of this process and the children that have ended."""
    times = psutil.Process().cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def in_turn(
    works: Mapping[str, Callable[[], float | None]], repeats: int
) -> dict[str, list[float]]:
    """Seconds of each: what the work itself says, else how long it took. After one round that is
    not counted."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, work in works.items():
            started = time.perf_counter()
            measured = work()
            seconds = time.perf_counter() - started
            found[name].append(seconds if measured is None else measured)
    return {name: seconds[1:] for name, seconds in found.items()}


# -- bandwidth


def measure_bandwidth(notes: Notes, repeats: int, *, quick: bool) -> None:
    config = TransferConfig()
    sizes = SIZES[:4] if quick else SIZES
    for dtype in ("bfloat16", "int8"):
        shape = Shape(dtype=dtype)
        (layout,) = shape.layouts()
        pool = new_pool(layout, sizes[-1])
        with (
            open_wires(MESSAGE_MIB[-1] * MIB) as wires,
            far_owner(shape, sizes[-1], config) as far,
            near_owner(shape, sizes[-1], config) as near,
        ):
            far_reader = Reader(far, shape, [pool], config)
            near_reader = Reader(near, shape, [pool], config)
            source = torch.ones(pool.nbytes, dtype=torch.uint8)
            target = torch.zeros(pool.nbytes, dtype=torch.uint8)
            for size in sizes:
                num_bytes = size * layout.bytes_per_block
                messages = message_sizes(size, layout, config.max_message_bytes)
                works: dict[str, Callable[[], float | None]] = {
                    "memcpy": partial(_copy, source[:num_bytes], target[:num_bytes]),
                    **pack_works(pool, layout, size, config.max_message_bytes),
                    "TCP": partial(wires.tcp, messages),
                    "gloo": partial(wires.gloo, messages),
                    "pull": partial(_pull, far, far_reader, size),
                    "loopback pull": partial(_pull, near, near_reader, size),
                }
                for name, seconds in in_turn(works, repeats).items():
                    notes.add("bandwidth", name, f"{dtype}, {size} blocks", seconds, num_bytes)
            near_reader.close()
            if dtype == "bfloat16":
                del source, target
                sweep_messages(notes, far, wires, pool, repeats)
            far_reader.close()


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def pack_works(
    pool: torch.Tensor, layout: KVLayout, num_blocks: int, max_message_bytes: int
) -> dict[str, Callable[[], None]]:
    """What each end of a pull does beside sending: all its messages, one after another."""
    block_ids, staging = scattered(num_blocks), StagingBuffer(layout, pool.device)
    parts = plan_messages(range(num_blocks * layout.block_size), layout, max_message_bytes)

    def gather_all() -> None:
        for part in parts:
            gather(pool, layout, block_ids, part, staging.message(part), layout)

    def scatter_all() -> None:
        for part in parts:
            scatter(staging.message(part), layout, pool, layout, block_ids, part)

    return {"gather": gather_all, "scatter": scatter_all}


def _pull(owner: Owner, reader: Reader, num_blocks: int) -> float:
    return reader.pull(owner.offer(num_blocks))


def message_sizes(num_blocks: int, layout: KVLayout, max_message_bytes: int) -> list[int]:
    positions = range(num_blocks * layout.block_size)
    parts = plan_messages(positions, layout, max_message_bytes)
    return [len(part) // layout.block_size * layout.bytes_per_block for part in parts]


def sweep_messages(
    notes: Notes, far: Owner, wires: Wires, pool: torch.Tensor, repeats: int
) -> None:
    shape = Shape()
    (layout,) = shape.layouts()
    readers = {
        mib: Reader(far, shape, [pool], TransferConfig(max_message_bytes=mib * MIB))
        for mib in MESSAGE_MIB
    }
    for size in SWEPT:
        if size > pool.shape[2]:
            continue
        works: dict[str, Callable[[], float | None]] = {}
        for mib, reader in readers.items():
            messages = message_sizes(size, layout, mib * MIB)
            works[f"pull, {mib} MiB"] = partial(_pull, far, reader, size)
            works[f"gloo, {mib} MiB"] = partial(wires.gloo, messages)
        for name, seconds in in_turn(works, repeats).items():
            num_bytes = size * layout.bytes_per_block
            notes.add("messages", name, f"{size} blocks", seconds, num_bytes)
    for reader in readers.values():
        reader.close()


# -- shapes


def measure_shapes(notes: Notes, repeats: int, *, quick: bool) -> None:
    num_tokens = (64 if quick else SHAPE_BLOCKS) * 16
    for name, (source, target) in PAIRS.items():
        num_blocks = num_tokens // source.block_size
        pools = [new_pool(each, num_tokens // target.block_size) for each in target.layouts()]
        config = TransferConfig()
        for path, owner_of in (("gloo", far_owner), ("loopback", near_owner)):
            with owner_of(source, num_blocks, config) as owner:
                reader = Reader(owner, target, pools, config)
                seconds = in_turn({path: partial(_pull, owner, reader, num_blocks)}, repeats)
                reader.close()
            row_bytes = min(source.layouts()[0].row_bytes, target.layouts()[0].row_bytes)
            num_bytes = num_tokens * source.num_layers * source.num_kv_heads * 2 * row_bytes
            notes.add("shapes", path, name, seconds[path], num_bytes)


# -- hand-over


def measure_handover(notes: Notes, repeats: int, *, quick: bool) -> None:
    config = TransferConfig()
    pools = [new_pool(layout, 1) for layout in SMALL.layouts()]
    for path, owner_of in (("gRPC and gloo", far_owner), ("in process", near_owner)):
        with owner_of(SMALL, 1, config) as owner:
            reader, client = Reader(owner, SMALL, pools, config), owner.new_client()
            works: dict[str, Callable[[], float | None]] = {
                "open channel": partial(_pull, owner, reader, 1),
                "first contact": partial(_first_pull, owner, pools, config),
                "one call": partial(_ask_nothing, client),
            }
            for name, seconds in in_turn(works, 4 * repeats).items():
                notes.add("handover", name, path, seconds)
            client.close()
            reader.close()


def _first_pull(owner: Owner, pools: Sequence[torch.Tensor], config: TransferConfig) -> float:
    reader = Reader(owner, SMALL, pools, config)
    try:
        return _pull(owner, reader, 1)
    finally:
        reader.close()


def _ask_nothing(client: PeerClient) -> None:
    client.renew(())


# -- steps


def measure_steps(notes: Notes, repeats: int, *, quick: bool) -> None:
    repeats = repeats if quick else 2 * repeats
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        for shape in SHAPES:
            with running(folder, shape) as executor:
                for step in STEPS:
                    seconds = in_turn({shape: partial(_execute, executor, step)}, repeats)
                    notes.add("steps", shape, step.name, seconds[shape])
    for shape, names in (("tp2", ("plan", "all_reduce", "all_gather")), ("pp2", ("pipeline",))):
        with open_messages(SHAPES[shape]) as messages:
            for step in STEPS:
                for name in names:
                    note_messages(notes, messages, step, name, repeats)


def _execute(executor: Executor, step: Step) -> None:
    executor.execute(step.batch)


def note_messages(
    notes: Notes, messages: StepMessages, step: Step, name: str, repeats: int
) -> None:
    notes.add("step messages", name, step.name, messages.seconds(name, step, repeats))


# -- what comes out


def tables(notes: Notes) -> str:
    parts = {
        "bandwidth": bandwidth_table,
        "messages": message_table,
        "shapes": shape_table,
        "handover": handover_table,
        "steps": step_table,
    }
    texts = [make(notes) for part, make in parts.items() if notes.of(part)]
    others = ", ".join(f"{name} {cores}" for name, cores in notes.other_cores.items())
    return "\n\n".join([*texts, f"Cores that others used meanwhile: {others}."]) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def spread(point: Point) -> str:
    return f"{point.median_ms:.3g} ({point.lowest_ms:.3g} to {point.highest_ms:.3g})"


def share(part: Point, whole: Point) -> str:
    return f"{whole.lowest_ms / part.lowest_ms:.0%}"


def cases(points: Mapping[tuple[str, str], Point]) -> list[str]:
    return list(dict.fromkeys(case for case, _ in points))


def bandwidth_table(notes: Notes) -> str:
    points = notes.of("bandwidth")
    names = ("memcpy", "TCP", "gloo", "pull", "loopback pull", "gather", "scatter")
    rows = []
    for case in cases(points):
        memcpy, tcp, gloo, pull, loopback, *packs = (points[case, name] for name in names)
        assert pull.num_bytes is not None
        rows.append([
            case, f"{pull.num_bytes / MIB:.1f}", spread(pull),
            *(f"{point.gib_s:.2f}" for point in (pull, gloo, tcp)),
            share(pull, gloo), share(pull, tcp), *(f"{point.gib_s:.2f}" for point in packs),
            f"{loopback.gib_s:.2f}", f"{memcpy.gib_s:.2f}", share(loopback, memcpy),
        ])  # fmt: skip
    header = [
        "KV", "MiB", "pull ms", "pull GiB/s", "bare gloo", "TCP", "of gloo", "of TCP",
        "gather", "scatter",
        "loopback pull GiB/s", "memcpy", "of memcpy",
    ]  # fmt: skip
    return table(header, rows)


def message_table(notes: Notes) -> str:
    points = notes.of("messages")
    sizes = [mib for mib in MESSAGE_MIB if any(name == f"pull, {mib} MiB" for _, name in points)]
    rows = [
        [case, wire, *(f"{points[case, f'{wire}, {mib} MiB'].gib_s:.2f}" for mib in sizes)]
        for case in cases(points)
        for wire in ("pull", "gloo")
    ]
    return table(["GiB/s in messages of", "", *(f"{mib} MiB" for mib in sizes)], rows)


def shape_table(notes: Notes) -> str:
    points = notes.of("shapes")
    rows = []
    for case in cases(points):
        gloo, loopback = points[case, "gloo"], points[case, "loopback"]
        equal = points["equal", "gloo"], points["equal", "loopback"]
        assert gloo.num_bytes is not None
        rows.append([
            case, f"{gloo.num_bytes / MIB:.0f}",
            spread(gloo), f"{gloo.gib_s:.2f}", f"{gloo.lowest_ms / equal[0].lowest_ms:.2f}",
            spread(loopback), f"{loopback.gib_s:.2f}",
            f"{loopback.lowest_ms / equal[1].lowest_ms:.2f}",
        ])  # fmt: skip
    header = [
        "shapes", "MiB moved", "gloo ms", "GiB/s", "x equal",
        "loopback ms", "GiB/s", "x equal",
    ]  # fmt: skip
    return table(header, rows)


def handover_table(notes: Notes) -> str:
    points = notes.of("handover")
    names = ("open channel", "first contact", "one call")
    rows = [[case, *(spread(points[case, name]) for name in names)] for case in cases(points)]
    return table(["one block, ms", *names], rows)


def step_table(notes: Notes) -> str:
    points, messages = notes.of("steps"), notes.of("step messages")
    rows = [[case, *(spread(points[case, shape]) for shape in SHAPES)] for case in cases(points)]
    text = table(["step, ms", *SHAPES], rows)
    names = ("plan", "all_reduce", "all_gather", "pipeline")
    rows = [[case, *(spread(messages[case, name]) for name in names)] for case in cases(messages)]
    header = [
        "messages alone, ms", "tp2: plan and back", f"tp2: {NUM_REDUCES} all-reduces",
        "tp2: all-gather of logits", "pp2: plan, hidden states, results",
    ]  # fmt: skip
    return f"{text}\n\n{table(header, rows)}"


PARTS = {
    "bandwidth": measure_bandwidth,
    "shapes": measure_shapes,
    "handover": measure_handover,
    "steps": measure_steps,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="few and small: a trial")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats = 2
    arguments.threads = 1
    return arguments


def _bare(argument: str) -> str:
    return Path(argument).name


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    notes = Notes()
    command = " ".join(["python benchmarks/transfer.py", *map(_bare, sys.argv[1:])])
    about = machine(arguments) | {"command": command}
    for name in arguments.parts:
        with notes.part(name):
            PARTS[name](notes, arguments.repeats, quick=arguments.quick)
    text = tables(notes)
    print(text)
    if arguments.out:
        points = [asdict(point) for point in notes.points]
        result = {"machine": about, "other_cores": notes.other_cores, "points": points}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
