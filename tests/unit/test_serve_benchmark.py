"""The arithmetic of benchmarks/serve.py and step_curves.py, and the client of the former."""

import asyncio
import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from benchmarks.load import Ask, Outcome, closed_loop, percentile, text_workload
from benchmarks.loads import Run, summary
from benchmarks.step_curves import Limits, Point, charts, decoding, prefilling
from benchmarks.svg_chart import Chart, Line, svg
from benchmarks.targets import Target, judge, load_table, ratio_table

RUN = Run(
    num_requests=4,
    num_failed=0,
    num_cut=0,
    seconds=1.0,
    output_tok_s=100.0,
    prefill_tok_s=0.0,
    ttft_p50_ms=10.0,
    ttft_p95_ms=20.0,
    itl_p50_ms=1.0,
    itl_p95_ms=2.0,
    server_cores=1.0,
    client_cores=0.1,
    other_cores=0.0,
)
SPEED = Target(
    load="8 streams", measure="output_tok_s", ours=("a", "b"), peers=("x", "y"), factor=2.0
)
EVENT = {"choices": [{"text": "a"}], "usage": None}
USAGE = {"choices": [], "usage": {"completion_tokens": 2}}


def runs_of(**speeds):
    """Server's name -> its speed in each round."""
    return {
        name: {"8 streams": [replace(RUN, output_tok_s=speed) for speed in of_rounds]}
        for name, of_rounds in speeds.items()
    }


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [([], 0.5, 0.0), ([3.0], 0.95, 3.0), ([4.0, 1.0], 0.5, 2.5), (list(range(101)), 0.95, 95.0)],
)
def test_percentile_lies_between_its_neighbours(values, share, found):
    assert percentile(values, share) == found


def test_a_ratio_is_of_the_best_medians_and_its_spread_of_the_rounds():
    verdict = judge(SPEED, runs_of(a=[1, 1, 1], b=[10, 20, 30], x=[10, 10, 5], y=[1, 1, 1]))
    assert (verdict.ours, verdict.peer) == ("b", "x")
    assert (verdict.ratio, verdict.lowest, verdict.highest) == (2.0, 1.0, 6.0)
    assert verdict.is_met


def test_less_is_better_for_times():
    target = SPEED._replace(measure="ttft_p95_ms", factor=0.5)
    runs = {
        name: {"8 streams": [replace(RUN, ttft_p95_ms=ms)]}
        for name, ms in {"a": 60.0, "b": 90.0, "x": 100.0, "y": 200.0}.items()
    }
    verdict = judge(target, runs)
    assert (verdict.ours, verdict.peer, verdict.is_met) == ("a", "x", False)
    assert "missed by 20%" in ratio_table([verdict])[-1]


@pytest.mark.parametrize("broken", [{"num_failed": 1}, {"num_cut": 1}])
def test_broken_runs_decide_nothing(broken):
    runs = runs_of(a=[10.0], x=[5.0])
    runs["x"]["8 streams"] = [replace(RUN, **broken)]
    verdict = judge(SPEED, runs)
    assert verdict.ratio is None
    assert "not measured" in ratio_table([verdict])[-1]
    assert "1 of 4 requests not ended" in load_table(runs, ["8 streams"])[-1]


def test_a_round_is_paired_with_the_same_round_where_another_failed():
    runs = runs_of(a=[10.0, 20.0, 30.0], x=[1.0, 2.0, 3.0])
    runs["x"]["8 streams"][0] = replace(RUN, num_failed=1)
    verdict = judge(SPEED, runs)
    assert (verdict.lowest, verdict.highest) == (10.0, 10.0)


def test_a_summary_counts_good_requests_alone():
    wanted = [Ask(prompt=(1,) * 8, num_output_tokens=3)] * 3
    good = Outcome(sent=0.0, arrivals=[0.5, 0.6, 0.8], num_output_tokens=3)
    found = summary(
        wanted,
        [good, Outcome(sent=0.0, error="HTTP 500")],
        2.0,
        server_cores=1.0,
        client_cores=0.0,
        other_cores=0.0,
    )
    assert (found.num_failed, found.num_cut, found.error) == (1, 1, "HTTP 500")
    assert (found.output_tok_s, found.ttft_p50_ms, found.itl_p50_ms) == (1.5, 500.0, 150.0)
    assert found.prefill_tok_s == 16.0


def test_prompts_have_exact_lengths_and_share_only_what_they_should():
    asks = text_workload(
        range(1000), num_requests=9, prompt_tokens=50, output_tokens=1, num_shared_tokens=30
    )
    assert {len(ask.prompt) for ask in asks} == {80}
    assert len({ask.prompt[:30] for ask in asks}) == 1
    assert len({ask.prompt[30] for ask in asks}) == 9


@pytest.fixture
def serve_once():
    """Runs the client against a server that answers each connection with these pieces."""

    def run(pieces, *, num_requests=1, timeout_s=30.0, hangs=False):
        async def answer(reader, writer):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                await reader.readexactly(length)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                if hangs:
                    await asyncio.sleep(60)
            finally:
                writer.close()

        async def both():
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            asks = [Ask(prompt=(1, 2), num_output_tokens=2)] * num_requests
            try:
                return await closed_loop(f"http://127.0.0.1:{port}", "m", asks, 1, timeout_s)
            finally:
                server.close()

        return asyncio.run(both())

    return run


def sse(*events):
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()


def chunked(body, size):
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return [f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in (*parts, b"")]


OK = b"HTTP/1.1 200 OK\r\nX-Request-Id: r1\r\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_client_reads_chunks_cut_anywhere(serve_once, size):
    body = sse(EVENT, EVENT, USAGE) + b"data: [DONE]\n\n"
    pieces = [OK + b"Transfer-Encoding: chunked\r\n\r\n", *chunked(body, size)]
    (outcome,), _ = serve_once(pieces)
    assert outcome.error is None
    assert (len(outcome.arrivals), outcome.num_output_tokens) == (2, 2)
    assert outcome.request_id == "r1"


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([b"HTTP/1.1 503 no\r\n\r\n", b"busy"], "HTTP 503: busy"),
        ([OK + b"\r\n", sse({"error": {"message": "gone"}})], "gone"),
        ([OK + b"\r\n"], "no text came"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n", b"ff\r\nda"], "IncompleteReadError"),
        ([b"SSH-2.0\r\n\r\n"], "ValueError"),
    ],
)
def test_the_client_tells_what_went_wrong(serve_once, pieces, error):
    (outcome,), _ = serve_once(pieces)
    assert error in outcome.error


def test_what_takes_too_long_is_cut_off(serve_once):
    outcomes, seconds = serve_once([OK], num_requests=3, timeout_s=0.1, hangs=True)
    assert outcomes == []
    assert seconds < 30


def test_the_limit_is_the_longer_of_reading_and_computing():
    limits = Limits(
        read_bandwidth={1 << 20: 200.0, 1 << 30: 100.0}, bfloat16_ops=10.0, int8_ops=20.0
    )
    assert limits.seconds(1 << 29, 1.0, quantized=False) == (1 << 29) / 100.0
    assert limits.seconds(1 << 20, 1.0, quantized=False) == (1 << 20) / 200.0
    assert limits.seconds(200.0, 400.0, quantized=False) == 40.0
    assert limits.seconds(200.0, 400.0, quantized=True) == 20.0


def test_decoded_sequences_have_blocks_of_their_own():
    batch = [decoding(i, 33) for i in range(3)]
    assert [one.num_computed_tokens for one in batch] == [32] * 3
    assert [block for one in batch for block in one.block_ids] == list(range(9))


def test_chunks_of_a_prompt_cover_it_and_only_the_last_samples():
    chunks = [batch.sequences[0] for batch in prefilling(100, 48)]
    assert [(one.num_computed_tokens, len(one.token_ids)) for one in chunks] == [
        (0, 48),
        (48, 48),
        (96, 4),
    ]
    assert [len(one.samples) for one in chunks] == [0, 0, 1]
    assert chunks[-1].block_ids == tuple(range(7))


def test_curves_stand_beside_their_limits():
    points = [
        Point(
            weights=weights,
            kind=kind,
            batch=batch,
            context=128,
            median_ms=2.0 * batch,
            lowest_ms=1.0,
            limit_ms=1.0 * batch,
            tok_s=1.0,
        )
        for weights in ("int8", "bf16")
        for kind, batch in (("decode", 1), ("decode", 2), ("prefill", 1))
    ]
    by_batch, by_context, prefill = charts(points)
    assert [line.label for line in by_batch.lines] == ["int8", "", "bf16", ""]
    assert by_batch.lines[0].points == [(1, 2.0), (2, 4.0)]
    assert by_batch.lines[1].points == [(1, 1.0), (2, 2.0)]
    assert by_context.lines[0].points == prefill.lines[0].points == [(128, 2.0)]


def test_a_chart_is_xml_with_one_point_for_each_measure():
    lines = [
        Line(label="a < b", points=[(1, 2.0), (2, 30.0)], colour=0),
        Line(label="", points=[(1, 1.0), (2, 10.0)], colour=0, is_limit=True),
    ]
    chart = Chart(title="t", x_label="x", y_label="ms", lines=lines)
    drawn = ElementTree.fromstring(svg([chart, chart]))
    assert len(drawn.findall(".//{*}circle")) == 4
    assert len(drawn.findall(".//{*}polyline")) == 4
