"""Choices of workers as properties of pure functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import WorkerUnavailableError
from core.worker import WorkerId, WorkerRole
from router.policy import WorkerSnapshot, choose_decode, choose_prefill


def worker(index: int = 0, role: WorkerRole = WorkerRole.PREFILL, **fields) -> WorkerSnapshot:
    base = WorkerSnapshot(
        worker_id=WorkerId(name=f"w{index}", incarnation="i"),
        role=role,
        model_fingerprint="m",
        block_size=16,
        max_num_seqs=8,
        num_free_blocks=100,
        num_seqs=0,
        num_queued_tokens=0,
        suspect=False,
        num_in_flight=0,
        num_in_flight_tokens=0,
    )
    return replace(base, **fields)


counts = st.integers(0, 10_000)
fleets = st.lists(
    st.fixed_dictionaries(
        {
            "num_queued_tokens": counts,
            "num_in_flight": st.integers(0, 20),
            "num_in_flight_tokens": counts,
            "num_seqs": st.integers(0, 20),
            "num_free_blocks": st.integers(0, 100),
        }
    ),
    min_size=1,
    max_size=6,
).map(lambda rows: [worker(i, **row) for i, row in enumerate(rows)])
matches = st.dictionaries(st.integers(0, 5).map(lambda i: worker(i).worker_id), st.integers(0, 80))


def backlog(w):
    return max(w.num_queued_tokens, w.num_in_flight_tokens)


@given(fleets, st.integers(1, 2000), matches, st.integers(0, 50))
def test_prefill_choice_has_the_fewest_tokens_before_it_is_done(fleet, num_tokens, matched, turn):
    def cost(w):
        cached = 16 * matched.get(w.worker_id, 0)
        return backlog(w) + max(1, num_tokens - cached)

    chosen = choose_prefill(fleet, num_tokens=num_tokens, matched=matched, rotation=turn)
    assert cost(chosen) == min(map(cost, fleet))


some = st.sets(st.integers(0, 5))


@given(fleets, some, some, some, st.booleans())
def test_excluded_never_avoided_and_suspects_only_when_nobody_else_is_left(
    fleet, excluded, avoided, suspects, decode
):
    fleet = [replace(w, suspect=i in suspects) for i, w in enumerate(fleet)]
    excluded = {worker(i).worker_id for i in excluded}
    avoided = {worker(i).worker_id for i in avoided}
    choose = choose_decode if decode else choose_prefill
    left = {w.worker_id for w in fleet} - excluded
    if not left:
        with pytest.raises(WorkerUnavailableError):
            choose(fleet, num_tokens=9, exclude=excluded, avoid=avoided)
        return
    chosen = choose(fleet, num_tokens=9, exclude=excluded, avoid=avoided).worker_id
    distrusted = avoided | {w.worker_id for w in fleet if w.suspect}
    assert chosen in left
    assert chosen not in distrusted or left <= distrusted


@given(st.integers(1, 6), st.integers(1, 200), st.booleans())
def test_a_burst_on_stale_reports_spreads_evenly(size, num_requests, decode):
    """Only the router's own counts change between the choices."""
    fleet = [worker(i) for i in range(size)]
    choose = choose_decode if decode else choose_prefill
    taken = [0] * size
    for turn in range(num_requests):
        chosen = choose(fleet, num_tokens=100, rotation=turn)
        index = fleet.index(chosen)
        taken[index] += 1
        fleet[index] = replace(
            chosen,
            num_in_flight=chosen.num_in_flight + 1,
            num_in_flight_tokens=chosen.num_in_flight_tokens + 100,
        )
    assert max(taken) - min(taken) <= 1


@given(fleets, st.integers(1, 1600), st.integers(0, 20))
def test_decode_choice_has_room_if_any_has(fleet, num_tokens, turn):
    def has_room(w):
        seqs = max(w.num_seqs, w.num_in_flight)
        return seqs < w.max_num_seqs and -(-num_tokens // 16) <= w.num_free_blocks

    chosen = choose_decode(fleet, num_tokens=num_tokens, rotation=turn)
    assert has_room(chosen) or not any(map(has_room, fleet))
    alike = [w for w in fleet if has_room(w) == has_room(chosen)]
    assert max(chosen.num_seqs, chosen.num_in_flight) == min(
        max(w.num_seqs, w.num_in_flight) for w in alike
    )


def test_ties_go_round():
    fleet = [worker(i) for i in range(3)]
    for choose in (choose_prefill, choose_decode):
        names = [choose(fleet, num_tokens=5, rotation=r).worker_id.name for r in range(6)]
        assert sorted(names) == ["w0", "w0", "w1", "w1", "w2", "w2"]
        assert len(set(names[:3])) == 3


def test_cached_prefix_beats_a_short_queue_but_not_a_long_one():
    cold, warm = worker(0), worker(1, num_queued_tokens=300)
    matched = {warm.worker_id: 30}  # 480 tokens
    assert choose_prefill([cold, warm], num_tokens=500, matched=matched) == warm
    warm = replace(warm, num_queued_tokens=600)
    assert choose_prefill([cold, warm], num_tokens=500, matched=matched) == cold


def test_decode_prefers_the_worker_that_must_pull_less():
    fleet = [worker(0, WorkerRole.DECODE), worker(1, WorkerRole.DECODE)]
    for index in (0, 1):
        matched = {fleet[index].worker_id: 3}
        for turn in (0, 1):
            chosen = choose_decode(fleet, num_tokens=64, matched=matched, rotation=turn)
            assert chosen == fleet[index]


def test_the_reason_is_named():
    with pytest.raises(WorkerUnavailableError, match="no prefill worker is connected"):
        choose_prefill([], num_tokens=1)
    only = worker()
    with pytest.raises(WorkerUnavailableError, match="not failed this request"):
        choose_decode([only], num_tokens=1, exclude=[only.worker_id])
