"""deploy.controller: what is launched and stopped, for any order of deaths and clock."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from core.worker import WorkerRole
from deploy import controller
from deploy.controller import Desired, Phase, backoff, died, progressed, reconcile, started

ONE_EACH = Desired(num_prefill=1, num_decode=1)


def ready(slots, *names, now=0.0):
    for name in names:
        slots = started(slots, name, slots[name].launch, address=f"{name}:1", pid=7, now=now)
    return slots


def kill(slots, name, now, fatal=False):
    return died(slots, name, slots[name].launch, error="boom", fatal=fatal, now=now)


def test_first_reconcile_launches_everything_once():
    plan = reconcile(Desired(num_prefill=2, num_decode=1), {}, 0.0)
    assert [slot.name for slot in plan.launch] == ["prefill-0", "prefill-1", "decode-0"]
    assert plan.launch[2].role is WorkerRole.DECODE
    assert reconcile(Desired(num_prefill=2, num_decode=1), plan.slots, 1.0).launch == ()


def test_colocated_workers_are_launched_by_their_role():
    plan = reconcile(Desired(num_colocated=2), {}, 0.0)
    assert [slot.name for slot in plan.launch] == ["colocated-0", "colocated-1"]
    assert {slot.role for slot in plan.launch} == {WorkerRole.COLOCATED}


def test_dead_worker_waits_then_is_launched_anew():
    slots = ready(reconcile(ONE_EACH, {}, 0.0).slots, "prefill-0", "decode-0")
    slots = kill(slots, "decode-0", now=1.0)
    assert slots["decode-0"].address is None
    plan = reconcile(ONE_EACH, slots, 1.0)
    assert plan.launch == ()
    assert plan.wake_at == 1.0 + controller.FIRST_BACKOFF_S
    again = reconcile(ONE_EACH, slots, plan.wake_at)
    assert [(slot.name, slot.launch) for slot in again.launch] == [("decode-0", 2)]
    assert again.slots["prefill-0"].phase is Phase.READY


def test_backoff_doubles_is_bounded_and_forgets_after_stable_service():
    assert [backoff(n) for n in (1, 2, 3)] == [0.5, 1.0, 2.0]
    assert backoff(10_000) == controller.MAX_BACKOFF_S
    slots = ready(reconcile(ONE_EACH, {}, 0.0).slots, "decode-0")
    slots = slots | {"decode-0": replace(slots["decode-0"], failures=6)}
    quick = kill(slots, "decode-0", now=1.0)
    assert quick["decode-0"].failures == 7
    late = kill(slots, "decode-0", now=controller.STABLE_S)
    assert late["decode-0"].failures == 1


def test_fatal_error_is_given_up_at_once():
    slots = kill(reconcile(ONE_EACH, {}, 0.0).slots, "decode-0", now=1.0, fatal=True)
    assert slots["decode-0"].phase is Phase.FAILED
    assert slots["decode-0"].error == "boom"
    assert reconcile(ONE_EACH, slots, 1e9).launch == ()


def test_slot_that_never_starts_is_given_up_but_one_that_served_is_not():
    slots, now = {}, 0.0
    for _ in range(controller.MAX_FAILED_STARTS):
        slots = reconcile(ONE_EACH, slots, now).slots
        if slots["prefill-0"].phase is Phase.STARTING:
            slots = ready(slots, "prefill-0", now=now)
        slots = kill(kill(slots, "decode-0", now), "prefill-0", now)
        now += 100
    assert slots["decode-0"].phase is Phase.FAILED
    assert slots["prefill-0"].phase is Phase.WAITING


def test_late_news_of_an_earlier_launch_changes_nothing():
    slots = kill(reconcile(ONE_EACH, {}, 0.0).slots, "decode-0", now=0.0)
    slots = reconcile(ONE_EACH, slots, 10.0).slots
    assert slots["decode-0"].launch == 2
    assert died(slots, "decode-0", 1, error="old", fatal=True, now=11.0) == slots
    assert started(slots, "decode-0", 1, address="old:1", pid=1, now=11.0) == slots
    assert progressed(slots, "decode-0", 1, "old", 0.5) == slots
    assert progressed(slots, "unknown", 1, "old", 0.5) == slots


def test_scaling_down_stops_the_last_ones_and_up_again_starts_fresh():
    two = Desired(num_prefill=1, num_decode=2)
    slots = ready(reconcile(two, {}, 0.0).slots, "prefill-0", "decode-0", "decode-1")
    plan = reconcile(ONE_EACH, slots, 1.0)
    assert [slot.name for slot in plan.stop] == ["decode-1"]
    assert set(plan.slots) == {"prefill-0", "decode-0"}
    assert [slot.name for slot in reconcile(two, plan.slots, 2.0).launch] == ["decode-1"]


events = st.lists(
    st.tuples(
        st.sampled_from(["ready", "die", "fatal", "tick", "scale"]),
        st.integers(0, 3),
        st.floats(0.0, 40.0),
    ),
    max_size=60,
)


@given(events)
def test_any_story_keeps_the_invariants(story):
    """Never two launches of one slot at a time, never before its backoff, never an undesired one,
    and once deaths end every slot that was not given up becomes ready."""
    desired, slots, now = Desired(num_prefill=2, num_decode=2), {}, 0.0
    alive: dict[str, int] = {}

    def step():
        nonlocal slots
        before = slots
        plan = reconcile(desired, slots, now)
        slots = plan.slots
        for slot in plan.stop:
            del alive[slot.name]
        for slot in plan.launch:
            assert slot.name not in alive, "launched twice"
            assert slot.name not in before or before[slot.name].retry_at <= now
            alive[slot.name] = slot.launch
        assert set(slots) == {name for name, _ in desired.names()}
        assert plan.wake_at is None or plan.wake_at > now

    step()
    for kind, index, seconds in story:
        now += seconds
        name = f"{'prefill' if index < 2 else 'decode'}-{index % 2}"
        if kind == "ready" and name in alive and slots[name].phase is Phase.STARTING:
            slots = ready(slots, name, now=now)
        elif kind in ("die", "fatal") and name in alive:
            del alive[name]
            slots = kill(slots, name, now, fatal=kind == "fatal")
        elif kind == "scale":
            desired = Desired(num_prefill=1 + index % 2, num_decode=1 + index // 2)
        step()

    now += controller.MAX_BACKOFF_S
    step()
    for name in list(alive):
        slots = ready(slots, name, now=now)
    assert {slot.phase for slot in slots.values()} <= {Phase.READY, Phase.FAILED}
