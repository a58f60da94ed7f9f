"""Who goes first and who waits: priorities, short prompts beside long ones, full pools."""

from collections import defaultdict

import pytest

from core.config import SchedulerConfig
from core.prefix import hash_root
from engine.batch import Pooling, SequenceResult
from engine.block_pool import BlockPool
from engine.scheduler import PrefillScheduler, Reserved
from engine.sequence import Sequence

ROOT = hash_root(model="m", salt="")


@pytest.fixture
def prefill_scheduler():
    def make(**config):
        return PrefillScheduler(SchedulerConfig(**config), BlockPool(400, 4), 1000)

    return make


@pytest.fixture
def scheduler(prefill_scheduler):
    return prefill_scheduler(max_num_batched_tokens=16)


def run(engine, limit=500):
    """Step in which each request's first and last token came."""
    first, last, tokens = {}, {}, defaultdict(list)
    for step in range(limit):
        if not engine.has_unfinished_requests:
            break
        for output in engine.step():
            first.setdefault(output.request_id, step)
            last[output.request_id] = step
            tokens[output.request_id] += output.chunk.token_ids
        engine.pool.check()
    assert not engine.has_unfinished_requests
    return first, last, tokens


def test_a_short_prompt_does_not_wait_for_a_long_one(make_token_engine, make_request):
    engine, executor = make_token_engine(num_blocks=200)
    engine.add_request(make_request([1] * 400, request_id="long", max_tokens=1))
    engine.step()
    for i in range(4):
        engine.add_request(make_request([2, i, 3], request_id=f"short{i}", max_tokens=1))
    first, _, _ = run(engine)
    assert max(first[f"short{i}"] for i in range(4)) <= 1
    assert sum(executor.batch_sizes) == 412
    assert executor.batch_sizes[:-1] == [16] * (len(executor.batch_sizes) - 1), "no step is wasted"


def test_a_long_prompt_takes_at_most_twice_its_time_beside_a_flood(make_token_engine, make_request):
    """Short prompts without end: half of each step is the long one's."""
    engine, _ = make_token_engine(num_blocks=200)
    engine.add_request(make_request([1] * 160, request_id="long", max_tokens=1))
    for step in range(21):
        for i in range(4):
            prompt = [2, step, i, 7, 7, 7]
            engine.add_request(make_request(prompt, request_id=f"{step}-{i}", max_tokens=1))
        outputs = engine.step()
        if any(output.request_id == "long" for output in outputs):
            break
    assert step < 20, "alone it takes 10 steps of 16 tokens"


def test_equal_prompts_go_one_after_another(scheduler, make_request):
    """Splitting a step between equals would make the first wait and help nobody."""
    for i in range(3):
        scheduler.add(Sequence(make_request([i] * 32, request_id=f"{i}"), ROOT, now=float(i)))
    shares = scheduler.schedule(0.0)
    assert [(s.request_id, len(s.token_ids)) for s in shares] == [("0", 16)]


def shares_of(scheduler, **reserved):
    shares = scheduler.schedule(0.0, Reserved(**reserved))
    return [(share.request_id, len(share.token_ids)) for share in shares]


def test_prompts_that_wait_together_are_read_one_after_another(prefill_scheduler, make_request):
    """In one step of 512 all six would get their first token at its end."""
    scheduler = prefill_scheduler(max_num_batched_tokens=512, prefill_step_tokens=64)
    for i in range(6):
        scheduler.add(Sequence(make_request([i] * 62, request_id=f"{i}"), ROOT, now=float(i)))
    assert shares_of(scheduler) == [("0", 62), ("1", 2)]


def test_running_answers_make_such_a_step_larger(prefill_scheduler, make_request):
    """The step's cost that they add is shared by more prompts, up to the budget of any step."""
    scheduler = prefill_scheduler(max_num_batched_tokens=256, prefill_step_tokens=64)
    for i in range(6):
        scheduler.add(Sequence(make_request([i] * 60, request_id=f"{i}"), ROOT, now=float(i)))
    assert shares_of(scheduler, num_tokens=1) == [("0", 60), ("1", 20)]
    assert shares_of(scheduler, num_tokens=100) == [("0", 60), ("1", 60), ("2", 36)]


def test_a_prompt_that_waits_alone_gets_the_whole_step(prefill_scheduler, make_request):
    scheduler = prefill_scheduler(max_num_batched_tokens=256, prefill_step_tokens=64)
    scheduler.add(Sequence(make_request([1] * 300, request_id="0"), ROOT, now=0.0))
    assert shares_of(scheduler) == [("0", 256)]
    assert shares_of(scheduler, num_tokens=6) == [("0", 250)]


def test_nobody_overtakes_a_prompt_that_waits_for_memory(make_token_engine, make_request):
    engine, _ = make_token_engine(num_blocks=10)
    engine.add_request(make_request([1] * 20, request_id="running", max_tokens=12))
    engine.step()
    engine.step()
    engine.add_request(make_request([2] * 24, request_id="large", max_tokens=1))
    engine.add_request(make_request([3] * 2, request_id="small", max_tokens=1))
    first, last, _ = run(engine)
    assert first["small"] > last["running"], "there was room for it all the time"
    assert first["large"] <= first["small"] + 1, "admitted first, but it takes two steps"


def test_priorities_order_the_line(make_token_engine, make_request):
    engine, _ = make_token_engine(max_num_seqs=1)
    for i, priority in enumerate([5, 0, -3, 0]):
        engine.add_request(make_request([i], request_id=f"{i}", priority=priority, max_tokens=2))
    first, _, _ = run(engine)
    assert sorted(first, key=first.get) == ["2", "1", "3", "0"]


def test_a_more_important_request_takes_the_blocks_of_a_less_important_one(
    make_token_engine, make_request, expected_tokens
):
    engine, _ = make_token_engine(num_blocks=8)
    engine.add_request(make_request([1] * 12, request_id="batch", priority=9, max_tokens=16))
    for _ in range(6):
        engine.step()
    engine.add_request(make_request([2] * 20, request_id="urgent", max_tokens=4))
    first, last, tokens = run(engine)
    assert first["urgent"] == 1, "two chunks of its prompt, nothing else"
    assert last["urgent"] < last["batch"]
    assert engine.kv_usage.num_preemptions == 1
    assert tuple(tokens["urgent"]) == expected_tokens((2,) * 20, 4)
    whole = expected_tokens((1,) * 12, 16)
    assert tuple(tokens["batch"]) == whole[-len(tokens["batch"]) :], "it lost nothing"


def test_nobody_is_stopped_in_vain(make_token_engine, make_request):
    """All less important answers together would not make room."""
    engine, _ = make_token_engine(num_blocks=14)
    engine.add_request(make_request([1] * 28, request_id="top", priority=0, max_tokens=8))
    engine.add_request(make_request([2] * 4, request_id="low", priority=9, max_tokens=8))
    for _ in range(4):
        engine.step()
    engine.add_request(make_request([3] * 30, request_id="middle", priority=5, max_tokens=1))
    for _ in range(3):
        engine.step()
        assert engine.kv_usage.num_preemptions == 0
    _, last, _ = run(engine)
    assert last["top"] <= last["middle"]


@pytest.mark.parametrize("length", [13, 14, 15, 16])
def test_a_prefix_that_only_the_victim_holds_is_no_gain(
    make_token_engine, make_request, expected_tokens, length
):
    """Freed, those blocks are the important prompt's own: taken as before."""
    engine, _ = make_token_engine(num_blocks=6, max_num_batched_tokens=64)
    for name, prompt, priority in (("top", [40] * 5, -10), ("low", [1, 2, 3, 4, 5], 10)):
        engine.add_request(make_request(prompt, request_id=name, priority=priority, max_tokens=8))
        engine.step()
    prompt = [1, 2, 3, 4, *[9] * (length - 4)]
    engine.add_request(make_request(prompt, request_id="middle", max_tokens=2))
    _, _, tokens = run(engine)
    assert tuple(tokens["middle"]) == expected_tokens(tuple(prompt), 2)


def test_prompts_go_on_however_many_answers_there_are(make_token_engine, make_request):
    engine, _ = make_token_engine(max_num_batched_tokens=2, max_num_seqs=8)
    for i in range(2):
        engine.add_request(make_request([i], request_id=f"{i}", max_tokens=60))
        engine.step()
    engine.add_request(make_request([7] * 5, request_id="late", priority=-1, max_tokens=1))
    first, _, _ = run(engine)
    assert first["late"] <= 6


def test_equal_priority_never_takes_anothers_place(make_token_engine, make_request):
    engine, _ = make_token_engine(num_blocks=8)
    engine.add_request(make_request([1] * 12, request_id="a", max_tokens=16))
    for _ in range(3):
        engine.step()
    engine.add_request(make_request([2] * 28, request_id="b", max_tokens=1))
    _, last, _ = run(engine)
    assert last["a"] < last["b"]
    assert engine.kv_usage.num_preemptions == 0


def test_the_least_important_and_youngest_is_preempted(make_token_engine, make_request):
    engine, _ = make_token_engine(num_blocks=9, max_num_batched_tokens=64)
    for name, priority in (("old", 0), ("urgent", -1), ("young", 0)):
        engine.add_request(
            make_request([priority + 2] * 8, request_id=name, priority=priority, max_tokens=15)
        )
    _, last, _ = run(engine)
    assert engine.kv_usage.num_preemptions > 0
    assert last["urgent"] <= last["old"] < last["young"]


def test_the_pool_is_full_before_anybody_is_preempted(make_token_engine, make_request):
    """And inside the blocks less than one is wasted per sequence."""
    engine, _ = make_token_engine(num_blocks=100, max_num_seqs=64, max_num_batched_tokens=512)
    for i in range(40):
        engine.add_request(make_request([i] * (3 + i % 9), request_id=f"{i}", max_tokens=30))
    while engine.has_unfinished_requests:
        engine.step()
        usage = engine.kv_usage
        assert usage.num_empty_slots < 4 * max(usage.num_sequences, 1)
    assert usage.num_preemptions > 0, "the load must exceed the pool"
    assert usage.num_used_at_preemption >= 96


def test_an_encoder_prompt_is_never_cut(engine_config, make_request):
    pool = BlockPool(100, 4)
    scheduler = PrefillScheduler(engine_config(max_num_batched_tokens=16).scheduler, pool, 1000)
    lengths = [10, 9, 40, 5]
    for i, length in enumerate(lengths):
        request = make_request([7] * length, request_id=f"{i}")
        scheduler.add(Sequence(request, ROOT, now=float(i), pooling=Pooling.MEAN, needs_whole=True))
    seen = []
    while not scheduler.idle:
        shares = scheduler.schedule(0.0)
        assert sum(len(s.token_ids) for s in shares) <= 16 or len(shares) == 1
        seen += [(s.request_id, len(s.token_ids)) for s in shares]
        for sequence in scheduler.update(shares, (SequenceResult(),) * len(shares)):
            sequence.release(pool)
    assert sorted(seen) == [(f"{i}", length) for i, length in enumerate(lengths)]
    assert pool.check().cached == 0, "what sees the whole prompt is of no use to another prompt"
