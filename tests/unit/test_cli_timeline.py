"""deploy.timeline: bars where the time went."""

import json
from dataclasses import asdict

import pytest

from core.lifetime import DecodeTimes, Lifetime, PrefillTimes
from deploy.api_client import lifetime_from_json
from deploy.timeline import milliseconds, render, size, spans


@pytest.fixture
def life():
    return Lifetime(
        request_id="chatcmpl-1", arrived=100.0, tokenized=100.01, prefill_sent=100.02,
        first_token=100.15, decode_sent=100.16, second_token=100.3, finished=101.0,
        num_prompt_tokens=50, num_output_tokens=18, prefill_worker="prefill-0@5b1b2036",
        decode_worker="decode-1", outcome="stop", notes=["routed again: decode-0 died"],
        prefill=PrefillTimes(
            queue_s=0.01, prefill_s=0.1, num_prompt_tokens=50, num_cached_tokens=16, num_steps=1
        ),
        decode=DecodeTimes(
            queue_s=0.0, transfer_s=0.04, decode_s=0.8, num_cached_blocks=1, num_pulled_blocks=3,
            num_pulled_bytes=3 << 20, num_steps=17,
        ),
    )  # fmt: skip


def test_stages_follow_each_other(life):
    found = spans(life)
    names = [span.name for span in found]
    assert names == ["tokenize", "queue", "prefill", "queue", "transfer", "decode"]
    starts = [span.start_s for span in found]
    assert starts == pytest.approx([0.0, 0.02, 0.03, 0.16, 0.16, 0.2])
    assert found[-1].start_s + found[-1].duration_s == pytest.approx(1.0)


def test_rendering_says_who_did_what(life):
    lines = render(life).splitlines()
    assert "first token after 150.0 ms" in lines[0]
    assert "then 50.0 ms per token" in lines[0]
    assert any("prefill-0: 34 tokens computed, 16 cached" in line for line in lines)
    assert any("3 blocks, 3.0 MiB prefill-0 -> decode-1" in line for line in lines)
    assert lines[-1].strip() == "routed again: decode-0 died"


@pytest.mark.parametrize("width", [1, 7, 40, 200])
def test_bars_keep_their_columns(life, width):
    bars = [line for line in render(life, width).splitlines() if " ms  " in line]
    assert len(bars) == 6
    assert len({line.index(" ms  ") for line in bars}) == 1


def test_decode_bar_takes_most_of_the_line(life):
    (decode,) = [line for line in render(life, 40).splitlines() if line.startswith("  decode")]
    assert decode.count("█") == 32


def test_request_that_never_reached_a_worker():
    life = Lifetime(request_id="r", arrived=5.0, outcome="overloaded")
    assert render(life) == "request r: overloaded"


def test_answer_that_ended_at_prefill(life):
    life.decode = life.decode_sent = life.decode_worker = None
    assert [span.name for span in spans(life)] == ["tokenize", "queue", "prefill"]


def test_a_colocated_worker_neither_queues_again_nor_moves_anything(life):
    life.decode_worker = life.prefill_worker
    assert [span.name for span in spans(life)] == ["tokenize", "queue", "prefill", "decode"]


def test_lifetime_survives_json_with_unknown_fields(life):
    tree = json.loads(json.dumps(asdict(life) | {"ttft_s": 0.15}))
    assert lifetime_from_json(tree) == life


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 20, "1.0 MiB"), (5 << 30, "5.0 GiB")],
)
def test_sizes(num_bytes, text):
    assert size(num_bytes) == text


def test_durations():
    assert [milliseconds(s) for s in (0.0015, 9.5, 12.0)] == ["1.5 ms", "9500.0 ms", "12.00 s"]
