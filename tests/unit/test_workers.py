"""PrefillWorker and DecodeWorker together over the token executor and the loopback transport.

No network and no model, but the real schedulers, pools, leases and transfers: whatever is aborted,
preempted, too large or stale, each request gets its own tokens or a named error, and at the end no
block is held on either side.
"""

import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import TransferConfig
from core.errors import (
    AbortedError,
    ContextLengthError,
    HandshakeRefusedError,
    InternalError,
    InvalidRequestError,
    PreemptedError,
    StaleHandleError,
    StepFailedError,
    TransferError,
    TwostrokeError,
)
from core.request import FinishReason
from decode_workers.worker import DecodeWorker
from engine.batch import Sampled, SequenceResult
from engine.block_pool import BlockPool
from kv_transfer.link import ReceivingRank
from kv_transfer.loopback import LoopbackTransports
from kv_transfer.rank_sender import RankSender
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from prefill_workers.worker import PrefillWorker


class Peer:
    """The owner, called directly instead of over gRPC."""

    def __init__(self, sender, gate):
        self.sender = sender
        self.gate = gate

    def connect(self, offer, timeout_s):
        self.sender.connect(offer)

    def pull(self, pull):
        self.gate.wait()
        return self.sender.pull(pull)

    def renew(self, handle_ids):
        return self.sender.renew(handle_ids)

    def release(self, handle_ids, reason):
        for handle_id in handle_ids:
            self.sender.release(handle_id, reason)

    def close(self):
        pass


class Pair:
    """One prefill and one decode worker, stepped by the test as their threads would."""

    def __init__(self, prefill_executor, decode_executor, config, lease_s=5.0, timeout_s=5.0):
        transports = LoopbackTransports()
        self.gate = threading.Event()
        self.gate.set()
        """Cleared, it holds every transfer where the receive is posted and nothing was sent."""
        transfer = TransferConfig(
            lease_s=lease_s, timeout_s=timeout_s, verify_checksum=True, max_message_bytes=64
        )
        self.prefill_executor, self.decode_executor = prefill_executor, decode_executor
        self.prefill_pool = BlockPool(prefill_executor.num_blocks, config.cache.block_size)
        self.decode_pool = BlockPool(decode_executor.num_blocks, config.cache.block_size)
        shared = {
            "config": transfer,
            "host": "loopback",
            "transports": transports,
            "clock": time.monotonic,
        }
        rank = RankSender(
            prefill_executor.kv_cache.tensor, layout=prefill_executor.layout, **shared
        )
        self.sender = KVSender(
            [rank],
            layouts=prefill_executor.layouts,
            incarnation="i",
            worker="p",
            address="p:1",
            config=transfer,
            backend=transports.backend,
            clock=time.monotonic,
        )
        rank = ReceivingRank(
            decode_executor.kv_cache.tensor, layouts=decode_executor.layouts, **shared
        )
        self.receiver = KVReceiver(rank, peers=lambda address: Peer(self.sender, self.gate))
        self.prefill = PrefillWorker(
            config, prefill_executor, self.prefill_pool, self.sender, time.monotonic
        )
        self.decode = DecodeWorker(
            config, decode_executor, self.decode_pool, self.receiver, time.monotonic
        )
        self.requests = {}
        self.tokens = {}
        self.ended = {}

    def submit(self, request):
        self.requests[request.request_id] = request
        self.tokens.setdefault(request.request_id, list(request.output_token_ids))
        self.prefill.submit(request, None)

    def step(self):
        """One step of each; tokens, ends and hand-overs are booked."""
        prefilled, decoded = self.prefill.step(), self.decode.step()
        for output in prefilled.outputs:
            self.book(output)
            if output.handle is not None:
                request = self.requests[output.request_id]
                rest = replace(request, output_token_ids=tuple(self.tokens[output.request_id]))
                try:
                    self.decode.submit(rest, output.handle)
                except TwostrokeError as error:
                    self.ended[output.request_id] = error
        for output in decoded.outputs:
            self.book(output)
        self.prefill_pool.check()
        self.decode_pool.check()
        return prefilled.worked or decoded.worked

    def book(self, output):
        assert output.request_id not in self.ended, "a request that has ended says no more"
        self.tokens[output.request_id] += output.token_ids
        if isinstance(output.error, PreemptedError):  # the router's part: the one recovery path
            request = self.requests[output.request_id]
            self.submit(request.with_output(tuple(self.tokens[output.request_id])))
        elif output.error or output.finish_reason:
            self.ended[output.request_id] = output.error or output.finish_reason

    def abort(self, request_id):
        attempt = self.requests[request_id].attempt
        self.prefill.abort(request_id, attempt)
        self.decode.abort(request_id, attempt)
        self.ended.setdefault(request_id, AbortedError("by the test"))

    def run(self, until, within_s=10.0):
        deadline = time.monotonic() + within_s
        while not until():
            if not self.step():
                time.sleep(0.0005)
            assert time.monotonic() < deadline, "no progress"

    def run_to_the_end(self):
        self.run(lambda: len(self.ended) == len(self.requests))
        self.run(self.nothing_is_held)

    def receiver_is_waiting(self):
        return self.decode.report().num_waiting == 1 and self.decode_pool.check().owned > 0

    def nothing_is_held(self):
        pools = (self.prefill_pool.check(), self.decode_pool.check())
        return not any(p.owned or p.leased or p.quarantined for p in pools)


@pytest.fixture(scope="session")
def make_pair(token_executor, engine_config):
    @contextmanager
    def make(
        *,
        prefill_blocks=32,
        decode_blocks=32,
        max_model_len=1000,
        lease_s=5.0,
        timeout_s=5.0,
        **sizes,
    ):
        config = engine_config(**sizes)
        pair = Pair(
            token_executor(prefill_blocks, config.cache.block_size, max_model_len),
            token_executor(decode_blocks, config.cache.block_size, max_model_len),
            config,
            lease_s,
            timeout_s,
        )
        try:
            yield pair
        finally:
            pair.gate.set()
            pair.receiver.close()
            pair.sender.close()

    return make


def test_prefill_here_decode_there(make_pair, make_request, expected_tokens):
    with make_pair() as pair:
        pair.submit(make_request(range(30), max_tokens=10))
        pair.run_to_the_end()
        assert tuple(pair.tokens["r"]) == expected_tokens(tuple(range(30)), 10)
        assert pair.ended["r"] is FinishReason.LENGTH
        assert pair.prefill_executor.batch_sizes == [16, 14]
        assert pair.decode_executor.batch_sizes == [1] * 9


@pytest.mark.parametrize("what", ["max_tokens", "stop_token", "eos"])
def test_a_first_token_that_ends_the_request_hands_nothing_over(
    make_pair, make_request, expected_tokens, what
):
    """The first token obeys every rule that a later one does."""
    [first] = expected_tokens((1, 2, 3), 1)
    request = make_request(
        (1, 2, 3),
        max_tokens=1 if what == "max_tokens" else 8,
        stop_token_ids=(first,) if what == "stop_token" else (),
    )
    if what == "eos":
        request = replace(request, eos_token_ids=(first,))
    with make_pair() as pair:
        pair.submit(request)
        pair.run_to_the_end()
        assert pair.tokens["r"] == [first]
        assert pair.decode_executor.batch_sizes == []
        assert pair.sender.num_leases == 0


def test_only_missing_blocks_move(make_pair, make_request):
    with make_pair() as pair:
        pair.submit(make_request(range(30), request_id="a", max_tokens=2))
        pair.run_to_the_end()
        outputs = []
        book = pair.book
        pair.book = lambda output: (outputs.append(output), book(output))
        pair.submit(make_request((*range(30), 7), request_id="b", max_tokens=2))
        pair.run_to_the_end()
        times = next(output.decode_times for output in outputs if output.decode_times)
        assert (times.num_cached_blocks, times.num_pulled_blocks) == (7, 1)


def test_bad_requests_never_enter(make_pair, make_request):
    with make_pair(prefill_blocks=4, decode_blocks=4) as pair:
        for bad, error in (
            (make_request([]), InvalidRequestError),
            (make_request([50]), InvalidRequestError),
            (make_request(range(16)), ContextLengthError),
        ):
            with pytest.raises(error):
                pair.prefill.submit(bad, None)
        with pytest.raises(InvalidRequestError):
            pair.decode.submit(make_request([1]), None)
        assert pair.nothing_is_held()


def test_refused_at_decode_releases_the_lease_at_once(make_pair, make_request):
    """A rejection on one side is told to the other, not left to the lease."""
    with make_pair(decode_blocks=4, lease_s=60.0) as pair:
        pair.submit(make_request(range(20), max_tokens=5))
        pair.run(lambda: "r" in pair.ended)
        assert isinstance(pair.ended["r"], ContextLengthError)
        pair.run(pair.nothing_is_held, within_s=1.0)


@pytest.mark.parametrize("forged", ["generation", "hashes", "incarnation", "attempt", "handle_id"])
def test_a_forged_handle_is_refused_and_the_true_one_still_works(
    make_pair, make_request, expected_tokens, forged
):
    """Never 200 with wrong KV. The owner checks every field of a reference."""
    with make_pair() as pair:
        request = make_request(range(30), max_tokens=4)
        pair.submit(request)
        handles = []
        while not handles:
            handles = [output.handle for output in pair.prefill.step().outputs]
        [handle] = handles
        first = expected_tokens(tuple(range(30)), 1)
        last = handle.blocks[-1]
        fake = {
            "generation": lambda: replace(
                handle, blocks=(*handle.blocks[:-1], replace(last, generation=last.generation + 1))
            ),
            "hashes": lambda: replace(handle, block_hashes=handle.block_hashes[::-1]),
            "incarnation": lambda: replace(handle, incarnation="other"),
            "attempt": lambda: replace(handle, attempt=1),
            "handle_id": lambda: replace(handle, handle_id="guessed"),
        }[forged]()
        zombie = replace(request, output_token_ids=first, attempt=fake.attempt)
        pair.requests["r"] = zombie
        if forged == "hashes":
            with pytest.raises(StaleHandleError):
                pair.decode.submit(zombie, fake)
            return
        pair.decode.submit(zombie, fake)
        pair.run(lambda: "r" in pair.ended)
        assert isinstance(pair.ended.pop("r"), TransferError)
        if forged != "handle_id":
            return  # who was refused gave the handle back, and the lease ended with that
        pair.tokens["r"] = list(first)
        pair.requests["r"] = replace(request, output_token_ids=first)
        pair.decode.submit(pair.requests["r"], handle)
        pair.run_to_the_end()
        assert tuple(pair.tokens["r"]) == expected_tokens(tuple(range(30)), 4)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_row_that_fails_ends_its_request_and_no_other(
    make_pair, make_request, expected_tokens, side
):
    with make_pair() as pair:
        executor = pair.prefill_executor if side == "prefill" else pair.decode_executor
        execute = executor.execute

        def poisoned(batch):
            bad = SequenceResult(sampled=(Sampled(None),))
            return tuple(
                bad if share.request_id == "bad" else result
                for share, result in zip(batch.sequences, execute(batch), strict=True)
            )

        executor.execute = poisoned
        pair.submit(make_request([1, 2, 3], request_id="bad", max_tokens=6))
        pair.submit(make_request([4, 5, 6], request_id="good", max_tokens=6))
        pair.run_to_the_end()
        assert isinstance(pair.ended["bad"], InternalError)
        assert tuple(pair.tokens["good"]) == expected_tokens((4, 5, 6), 6)


def test_a_failed_neighbour_does_not_clear_what_a_pull_still_reads(
    make_pair, make_request, expected_tokens
):
    """The blocks of a prefix that both share are leased to the good request's pull."""
    prefix = tuple(range(12))
    with make_pair() as pair:
        execute = pair.prefill_executor.execute

        def poisoned(batch):
            return tuple(
                result._replace(is_finite=share.request_id != "bad")
                for share, result in zip(batch.sequences, execute(batch), strict=True)
            )

        pair.prefill_executor.execute = poisoned
        pair.gate.clear()
        pair.submit(make_request((*prefix, 13), request_id="good", max_tokens=6))
        for _ in range(3):
            pair.step()
        pair.submit(make_request((*prefix, 14, 15), request_id="bad", max_tokens=6))
        for _ in range(3):
            pair.step()
        pair.gate.set()
        pair.run_to_the_end()
        assert isinstance(pair.ended["bad"], InternalError)
        assert tuple(pair.tokens["good"]) == expected_tokens((*prefix, 13), 6)


@pytest.mark.parametrize(
    "change", [{"block_size": 6}, {"dtype": "float99"}, {"model": "other"}, {"num_layers": -1}]
)
def test_a_handle_of_another_layout_is_refused_before_blocks_are_taken(
    make_pair, make_request, expected_tokens, change
):
    with make_pair(lease_s=60.0) as pair:
        request = make_request(range(30), max_tokens=4)
        pair.submit(request)
        handles = []
        while not handles:
            handles = [output.handle for output in pair.prefill.step().outputs]
        odd = replace(handles[0], layouts=(replace(handles[0].layouts[0], **change),))
        first = expected_tokens(tuple(range(30)), 1)
        with pytest.raises(HandshakeRefusedError, match=next(iter(change))):
            pair.decode.submit(replace(request, output_token_ids=first), odd)
        assert pair.decode_pool.check().owned == 0
        pair.run(pair.nothing_is_held, within_s=1.0)


def test_an_attempt_that_is_here_already_is_refused(make_pair, make_request, expected_tokens):
    with make_pair() as pair:
        pair.gate.clear()
        request = make_request(range(20), max_tokens=3)
        pair.submit(request)
        outputs = []
        while not outputs:
            outputs = pair.prefill.step().outputs
        rest = replace(request, output_token_ids=outputs[0].token_ids)
        pair.tokens["r"] = list(outputs[0].token_ids)
        pair.decode.submit(rest, outputs[0].handle)
        for _ in range(2):  # waiting, then pulling
            with pytest.raises(InvalidRequestError, match="already"):
                pair.decode.submit(rest, replace(outputs[0].handle, handle_id="another"))
            pair.decode.step()
        pair.gate.set()
        pair.run_to_the_end()
        assert tuple(pair.tokens["r"]) == expected_tokens(tuple(range(20)), 3)


def test_what_waits_behind_a_silent_owner_fails_with_the_first_timeout(make_pair, make_request):
    """Not one timeout after the other."""
    with make_pair(timeout_s=0.4) as pair:
        pair.gate.clear()
        for i in range(4):
            pair.submit(make_request(range(10 * i, 10 * i + 10), request_id=str(i), max_tokens=4))
        started = time.monotonic()
        pair.run(lambda: len(pair.ended) == 4)
        assert time.monotonic() - started < 4 * 0.4
        assert all(isinstance(error, TransferError) for error in pair.ended.values())
        pair.gate.set()
        pair.run(pair.nothing_is_held)


def test_nobody_comes_for_the_kv(make_pair, make_request):
    with make_pair(lease_s=0.2) as pair:
        pair.submit(make_request(range(30), max_tokens=4))
        while not pair.prefill.step().outputs:
            pass
        assert pair.prefill_pool.check().leased == 8
        pair.run(pair.nothing_is_held, within_s=1.0)


def test_a_lease_is_kept_alive_while_decode_has_no_room(make_pair, make_request, expected_tokens):
    with make_pair(lease_s=0.15, max_num_seqs=1) as pair:
        pair.submit(make_request(range(10), request_id="long", max_tokens=80))
        pair.submit(make_request(range(20, 30), request_id="waits", max_tokens=4))
        slow = pair.decode.step

        def step():
            time.sleep(0.01)
            return slow()

        pair.decode.step = step
        pair.run_to_the_end()
        assert tuple(pair.tokens["waits"]) == expected_tokens(tuple(range(20, 30)), 4)
        assert tuple(pair.tokens["long"]) == expected_tokens(tuple(range(10)), 80)


def test_blocks_under_transfer_are_given_to_nobody_until_it_has_ended(
    make_pair, make_request, expected_tokens
):
    """Aborted while bytes are on their way; the next request must not get its blocks."""
    with make_pair(decode_blocks=8) as pair:
        pair.gate.clear()
        pair.submit(make_request(range(24), request_id="gone", max_tokens=4))
        pair.run(pair.receiver_is_waiting)
        time.sleep(0.1)  # until the transfer thread is at the gate
        pair.abort("gone")
        assert pair.decode_pool.check().quarantined == 6
        pair.submit(make_request(range(30, 46), request_id="next", max_tokens=4))
        for _ in range(50):
            pair.step()
        assert pair.decode_pool.check().owned == 0, "4 blocks are needed and 2 are left"
        pair.gate.set()
        pair.run_to_the_end()
        assert tuple(pair.tokens["next"]) == expected_tokens(tuple(range(30, 46)), 4)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_step_that_fails_ends_its_requests_and_not_the_worker(
    make_pair, make_request, expected_tokens, side
):
    with make_pair() as pair:
        executor = pair.prefill_executor if side == "prefill" else pair.decode_executor
        execute = executor.execute

        def fail_once(batch):
            executor.execute = execute
            raise RuntimeError("out of memory, say")

        executor.execute = fail_once
        pair.submit(make_request(range(10), request_id="dies", max_tokens=4))
        pair.run_to_the_end()
        assert isinstance(pair.ended["dies"], StepFailedError)
        pair.submit(make_request(range(10), request_id="lives", max_tokens=4))
        pair.run_to_the_end()
        assert tuple(pair.tokens["lives"]) == expected_tokens(tuple(range(10)), 4)


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=20),
        st.integers(1, 12),
        st.integers(0, 40),  # step after which it is aborted; from 25 on never
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=60, deadline=None)
@given(
    requests=REQUESTS,
    prefill_blocks=st.integers(8, 24),
    decode_blocks=st.integers(8, 24),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 24),
)
def test_any_mix_gives_each_request_its_own_tokens(
    make_pair,
    make_request,
    expected_tokens,
    requests,
    prefill_blocks,
    decode_blocks,
    max_num_seqs,
    budget,
):
    with make_pair(
        prefill_blocks=prefill_blocks,
        decode_blocks=decode_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    ) as pair:
        for i, (prompt, max_tokens, _) in enumerate(requests):
            pair.submit(make_request(prompt, request_id=str(i), max_tokens=max_tokens))
        for step in range(25):
            for i, (_, _, abort_at) in enumerate(requests):
                if abort_at == step and str(i) not in pair.ended:
                    pair.abort(str(i))
            pair.step()
            time.sleep(0.0003)
        pair.run_to_the_end()
        for i, (prompt, max_tokens, abort_at) in enumerate(requests):
            got = tuple(pair.tokens[str(i)])
            assert got == expected_tokens(tuple(prompt), max_tokens)[: len(got)]
            if abort_at >= 25:
                assert len(got) == max_tokens, pair.ended[str(i)]
