"""Where the time of one request went, as bars in a terminal. Pure.

Durations measured by a worker are drawn from the moment the router sent it the request; what
remains until the answer came back (network, hand-over) stays blank.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.lifetime import Lifetime

WIDTH = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Seconds since the request arrived at the router."""

    name: str
    start_s: float
    duration_s: float
    note: str = ""


def spans(life: Lifetime) -> list[Span]:
    """What is known of the request's stages, in order."""
    found: list[Span] = []
    if life.tokenized is not None:
        tokens = counted(life.num_prompt_tokens, "prompt token")
        found.append(
            Span(
                name="tokenize", start_s=0.0, duration_s=life.tokenized - life.arrived, note=tokens
            )
        )
    return [*found, *_prefill_spans(life), *_decode_spans(life)]


def _prefill_spans(life: Lifetime) -> list[Span]:
    if life.prefill is None or life.prefill_sent is None:
        return []
    times, start = life.prefill, life.prefill_sent - life.arrived
    num_computed = times.num_prompt_tokens - times.num_cached_tokens
    return [
        Span(name="queue", start_s=start, duration_s=times.queue_s, note=_who(life.prefill_worker)),
        Span(
            name="prefill",
            start_s=start + times.queue_s,
            duration_s=times.prefill_s,
            note=f"{_who(life.prefill_worker)}: {counted(num_computed, 'token')} computed,"
            f" {times.num_cached_tokens} cached",
        ),
    ]


def _decode_spans(life: Lifetime) -> list[Span]:
    if life.decode is None or life.decode_sent is None:
        return []
    times, start = life.decode, life.decode_sent - life.arrived
    arrived = start + times.queue_s
    decode = Span(
        name="decode",
        start_s=arrived + times.transfer_s,
        duration_s=times.decode_s,
        note=f"{_who(life.decode_worker)}: {counted(life.num_output_tokens - 1, 'token')}"
        f" in {counted(times.num_steps, 'step')}",
    )
    if life.decode_worker == life.prefill_worker:  # colocated: it never queued or moved again
        return [decode]
    return [
        Span(name="queue", start_s=start, duration_s=times.queue_s, note=_who(life.decode_worker)),
        Span(
            name="transfer",
            start_s=arrived,
            duration_s=times.transfer_s,
            note=f"{counted(times.num_pulled_blocks, 'block')}, {size(times.num_pulled_bytes)}"
            f" {_who(life.prefill_worker)} -> {_who(life.decode_worker)}",
        ),
        decode,
    ]


def _who(worker: str | None) -> str:
    """The worker's name without its incarnation."""
    return (worker or "?").partition("@")[0]


def render(life: Lifetime, width: int = WIDTH) -> str:
    """A line of totals, then one bar for each stage."""
    found = spans(life)
    end = max((span.start_s + span.duration_s for span in found), default=0.0)
    lines = [_summary(life)]
    for span in found:
        duration = f"{span.duration_s * 1e3:8.1f} ms"
        lines.append(f"  {span.name:9}{_bar(span, end, width)}{duration}  {span.note}".rstrip())
    return "\n".join(lines + [f"  {note}" for note in life.notes])


def _summary(life: Lifetime) -> str:
    parts = [f"request {life.request_id}: {life.outcome}"]
    if life.finished is not None:
        parts.append(f"{milliseconds(life.finished - life.arrived)} in all")
    if life.ttft_s is not None:
        parts.append(f"first token after {milliseconds(life.ttft_s)}")
    if life.tpot_s is not None:
        parts.append(f"then {milliseconds(life.tpot_s)} per token")
    return ", ".join(parts)


def _bar(span: Span, end: float, width: int) -> str:
    """The span at its place on a line of `width` characters that stands for [0, end]."""
    scale = width / end if end > 0 else 0.0
    offset = min(int(span.start_s * scale), width - 1)
    eighths = max(1, round(span.duration_s * scale * 8)) if span.duration_s > 0 else 0
    full, rest = divmod(eighths, 8)
    bar = "█" * full + (_EIGHTHS[rest] if rest else "")
    return (" " * offset + bar)[:width].ljust(width)


def milliseconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def size(num_bytes: float) -> str:
    """In powers of two."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
