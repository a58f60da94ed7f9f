"""The sampler against a plain per-row reference over random parameters, and the laws recovery rests
on: a token depends on nothing but its row of logits and its spec."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from core.errors import InvalidRequestError
from core.request import TokenLogprobs
from core.sampling_params import MAX_SEED, SamplingParams
from engine.batch import Sampled, SampleSpec
from engine.sampler import prompt_logprobs, sample
from engine.sampler.choice import uniform

INF = float("inf")


def spec(
    choice_index=0, position=0, num_logprobs=None, prompt=(), output=(), barred=(), **sampling
):
    return SampleSpec(
        sampling=SamplingParams(**sampling),
        choice_index=choice_index,
        position=position,
        num_logprobs=num_logprobs,
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(output),
        barred_token_ids=tuple(barred),
    )


def tokens(logits, specs):
    """One spec per row; the token of each."""
    return [sampled.token_id for (sampled,) in sample(logits, [[row] for row in specs])]


# The reference, written as the definitions read: one row, one token at a time.


def edit(logit, change):
    """float64 in, rounded to a finite float32; what is barred stays so."""
    limits = np.finfo(np.float32)
    if logit == -INF:
        return logit
    return np.float32(np.clip(change(np.float64(logit)), limits.min, limits.max))


def processed(logits, row_spec):
    sampling, output = row_spec.sampling, row_spec.output_token_ids
    logits = logits.astype(np.float32).copy()
    seen = set(row_spec.prompt_token_ids) | set(output)
    for token_id in range(len(logits)):
        bias = sum(b for t, b in sampling.logit_bias if t == token_id)
        logit = edit(logits[token_id], lambda x, bias=bias: x + bias)
        if token_id in seen:
            penalty = sampling.repetition_penalty
            logit = edit(logit, lambda x, by=penalty: x / by if x > 0 else x * by)
        count = output.count(token_id)
        if count:
            penalty = sampling.presence_penalty + sampling.frequency_penalty * count
            logit = edit(logit, lambda x, by=penalty: x - by)
        completes = any(
            word[-1] == token_id and (len(word) == 1 or output[-len(word) + 1 :] == word[:-1])
            for word in sampling.bad_words
        )
        not_allowed = sampling.allowed_token_ids and token_id not in sampling.allowed_token_ids
        if completes or not_allowed or token_id in row_spec.barred_token_ids:
            logit = -INF
        logits[token_id] = logit
    return logits


def softmax(scaled):
    probabilities = np.exp(scaled - scaled.max())
    return probabilities / probabilities.sum()


def foremost(probabilities, order, mass):
    """The first tokens in `order` that together have that mass."""
    reached = np.cumsum(probabilities[order])
    return order[: np.searchsorted(reached, mass) + 1]


def allowed(logits, sampling):
    """Probabilities after all filters."""
    scaled = logits.astype(np.float64)
    scaled = (scaled - scaled.max()) / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled = np.where(scaled < np.sort(scaled)[-sampling.top_k], -INF, scaled)
    if sampling.top_p < 1:
        kept = foremost(softmax(scaled), np.argsort(-scaled, kind="stable"), sampling.top_p)
        scaled = np.where(scaled < scaled[kept].min(), -INF, scaled)
    if sampling.min_p > 0:
        scaled = np.where(scaled < scaled.max() + math.log(sampling.min_p), -INF, scaled)
    if sampling.typical_p < 1:
        probabilities = softmax(scaled)
        some = probabilities > 0
        information = np.full(len(scaled), INF)
        information[some] = scaled.max() - scaled[some] - np.log(probabilities.max())
        entropy = (probabilities[some] * information[some]).sum()
        distance = np.abs(information - entropy)
        kept = foremost(probabilities, np.argsort(distance, kind="stable"), sampling.typical_p)
        scaled = np.where(distance > distance[kept].max(), -INF, scaled)
    return softmax(scaled)


def reference(logits, row_spec):
    """A token, or None if all are barred."""
    logits = processed(logits, row_spec)
    if logits.max() == -INF:
        return None
    if row_spec.sampling.greedy:
        return int(np.flatnonzero(logits == logits.max())[0])
    probabilities = allowed(logits, row_spec.sampling)
    draw = uniform(row_spec) * probabilities.sum()
    return int(np.flatnonzero(np.cumsum(probabilities) > draw)[0])


def reference_logprobs(logits, token_id, count):
    logits = logits.astype(np.float64)
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    likeliest = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:count]
    return logprobs[token_id], [(i, logprobs[i]) for i in likeliest]


# Random rows with every parameter.

RANDOM = {
    "temperature": st.sampled_from([1e-3, 0.3, 1.0, 2.0]),
    "top_k": st.sampled_from([0, 1, 2, 7, 60, 10_000]),
    "top_p": st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    "typical_p": st.sampled_from([1e-6, 0.2, 0.9, 0.999, 1.0]),
    "seed": st.integers(-MAX_SEED, MAX_SEED),
}


@st.composite
def specs(draw, vocab_size, *, features="greedy random penalties bars"):
    """Each feature is there or not; all of them may be."""
    ids = st.integers(0, vocab_size - 1)
    some_ids = st.lists(ids, max_size=8)
    kinds = [kind for kind in features.split() if draw(st.booleans())]
    sampling, rest = {"temperature": 0.0}, {}
    if "random" in kinds:
        sampling = {name: draw(values) for name, values in RANDOM.items()}
    if "penalties" in kinds:
        rest = {"prompt": draw(some_ids), "output": draw(some_ids)}
        sampling["repetition_penalty"] = draw(st.sampled_from([1e-30, 0.5, 1.0, 1.3, 100.0]))
        sampling["presence_penalty"] = draw(st.sampled_from([-2.0, 0.0, 0.7]))
        sampling["frequency_penalty"] = draw(st.sampled_from([-0.5, 0.0, 1.1]))
        biases = st.tuples(ids, st.floats(-100, 100, width=32))
        sampling["logit_bias"] = tuple(draw(st.lists(biases, max_size=4)))
    if "bars" in kinds:
        words = st.lists(ids, min_size=1, max_size=3).map(tuple)
        rest |= {"output": draw(some_ids), "barred": draw(some_ids)}
        sampling["bad_words"] = tuple(draw(st.lists(words, max_size=4)))
        sampling["allowed_token_ids"] = tuple(draw(some_ids))
    try:
        return spec(
            choice_index=draw(st.integers(0, 5)),
            position=draw(st.integers(0, 10_000)),
            num_logprobs=draw(st.sampled_from([None, 0, 1, 5, 20])),
            **rest,
            **sampling,
        )
    except InvalidRequestError:
        reject()  # bad words bar every allowed token


@st.composite
def asks(draw, max_vocab_size=40, max_rows=5):
    """(logits, specs of each row)."""
    vocab_size = draw(st.integers(1, max_vocab_size))
    num_rows = draw(st.integers(0, max_rows))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    logits = rng.normal(size=(num_rows, vocab_size)) * draw(st.sampled_from([0, 0.5, 5, 50]))
    logits[rng.random(logits.shape) < draw(st.sampled_from([0, 0.2]))] = -INF
    logits[:, rng.integers(vocab_size)] = 1.0  # no row is without a finite maximum
    rows = st.lists(specs(vocab_size), max_size=3)
    return logits.astype(np.float32), [draw(rows) for _ in range(num_rows)]


@settings(deadline=None, max_examples=300)
@given(ask=asks())
def test_equals_the_reference(ask):
    logits, rows = ask
    got = sample(torch.from_numpy(logits), rows)
    assert [len(of_row) for of_row in got] == [len(of_row) for of_row in rows]
    for row, of_row in enumerate(rows):
        for sampled, row_spec in zip(got[row], of_row, strict=True):
            token_id = reference(logits[row], row_spec)
            assert (sampled.token_id, sampled.all_barred) == (token_id, token_id is None)
            check_logprobs(sampled, logits[row], row_spec.num_logprobs)


def check_logprobs(sampled, logits, count):
    if sampled.token_id is None or count is None:
        assert sampled.logprobs is None
        return
    own, likeliest = reference_logprobs(logits, sampled.token_id, count)
    assert sampled.logprobs.token_id == sampled.token_id
    assert sampled.logprobs.logprob == pytest.approx(own, abs=1e-9)
    assert [token_id for token_id, _ in sampled.logprobs.top] == [i for i, _ in likeliest]
    assert [x for _, x in sampled.logprobs.top] == pytest.approx([x for _, x in likeliest])


@settings(deadline=None, max_examples=100)
@given(ask=asks(max_rows=12), order=st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_its_neighbours(ask, order):
    """Bit for bit, log probabilities included, and whether choices share a row or have copies."""
    logits, rows = torch.from_numpy(ask[0]), ask[1]
    together = sample(logits, rows)
    for row, of_row in enumerate(rows):
        for choice, row_spec in enumerate(of_row):
            alone = sample(logits[row : row + 1], [[row_spec]])
            assert alone == [(together[row][choice],)]
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)
    assert sample(logits[shuffled], [rows[row] for row in shuffled]) == [
        together[row] for row in shuffled
    ]


EVERYTHING = [
    {"temperature": 0.0},
    {},
    {"top_k": 3},
    {"top_k": 5_000},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"min_p": 0.3},
    {"typical_p": 0.9},
    {"typical_p": 0.05},
    {"temperature": 0.7, "top_k": 400, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.3, "output": range(5_000)},
]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_large_row_does_not_depend_on_its_neighbours(num_threads):
    """Where torch splits work among threads, it splits a lone row otherwise than many."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        logits = torch.randn(33, 50_001, generator=torch.Generator().manual_seed(0))
        logits *= torch.logspace(-2, 1, 33).unsqueeze(-1)  # from flat to peaked
        rows = [
            [spec(position=i, num_logprobs=i % 4, **EVERYTHING[i % len(EVERYTHING)])]
            for i in range(33)
        ]
        together = sample(logits, rows)
        alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    finally:
        torch.set_num_threads(before)
    assert together == alone


def test_logits_are_left_as_they_are():
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    rows = [[spec(logit_bias=((1, 5.0),), allowed_token_ids=(1, 2), top_k=1, num_logprobs=2)]] * 2
    sample(logits, rows)
    assert torch.equal(logits, before)


# Filters and the draw.


@pytest.mark.parametrize("filtering", [{"top_p": 0.9}, {"typical_p": 0.9}, {"typical_p": 0.1}])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_mass_of_many_tokens(filtering, spread):
    """From flat distributions to peaked ones."""
    logits = np.random.default_rng(1).normal(size=(8, 5_000)).astype(np.float32) * spread
    rows = [spec(position=i, **filtering) for i in range(8)]
    expected = [reference(logits[i], row) for i, row in enumerate(rows)]
    assert tokens(torch.from_numpy(logits), rows) == expected


def test_greedy_takes_the_lowest_id_of_equal_logits():
    logits = torch.zeros(3, 50_000)
    logits[1, [40_000, 7, 30_000]] = 1.0
    assert tokens(logits, [spec(temperature=0.0)] * 3) == [0, 7, 0]


def test_what_is_likeliest_may_be_known_already():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    logits[2, 5] = math.nan
    rows = [[spec(temperature=0.0)], [spec(seed=1)], [spec(temperature=0.0)], [spec(top_k=3)]]
    known = logits.argmax(dim=-1).where(torch.tensor([True, True, False, True]), -1)
    assert sample(logits, rows, known) == sample(logits, rows)
    misled = sample(logits, rows, torch.tensor([7, 7, -1, 7]))
    assert misled[0] == (Sampled(7),)  # it is not computed again
    assert misled[1:] == sample(logits, rows)[1:]


@pytest.mark.parametrize("filtering", [{"top_k": 1}, {"top_p": 0.2}, {"min_p": 1.0}])
def test_filters_keep_ties(filtering):
    logits = torch.tensor([2.0, 1.0, 2.0, 1.0, 0.0])
    rows = [spec(position=i, **filtering) for i in range(64)]
    assert set(tokens(logits.repeat(64, 1), rows)) == {0, 2}


def test_typical_p_prefers_what_is_as_informative_as_expected():
    """arXiv:2202.00666: the likeliest token is not typical of a distribution with a long tail."""
    probabilities = torch.tensor([0.3, *[0.7 / 70] * 70])
    rows = [spec(position=i, typical_p=0.5) for i in range(200)]
    got = tokens(probabilities.log().repeat(200, 1), rows)
    assert 0 not in got
    assert len(set(got)) > 50
    assert 0 in tokens(probabilities.log().repeat(200, 1), [spec(position=i) for i in range(200)])


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2, "temperature": 1.5},
        {"typical_p": 0.6},
        {"logit_bias": ((2, 1.0), (5, -1.0)), "allowed_token_ids": (1, 2, 5, 7)},
        {"repetition_penalty": 1.5, "presence_penalty": 0.4, "prompt": [3], "output": [4, 4, 2]},
        {"top_k": 8, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9, "barred": [0]},
    ],
)
def test_frequencies_follow_the_distribution(sampling):
    """Chi-square over 8,000 positions; fixed seeds make the test deterministic."""
    logits = np.random.default_rng(3).normal(size=10).astype(np.float32)
    count = 8_000
    rows = [spec(position=i, seed=11, **sampling) for i in range(count)]
    probabilities = allowed(processed(logits, rows[0]), rows[0].sampling)
    got = [sampled.token_id for sampled in sample(torch.from_numpy(logits[None]), [rows])[0]]
    seen = np.bincount(got, minlength=10)
    kept = probabilities > 0
    assert seen[~kept].sum() == 0
    expected = probabilities[kept] * count
    chi_square = float(((seen[kept] - expected) ** 2 / expected).sum())
    assert chi_square < 30, "at most 9 degrees of freedom: p = 0.0004"


def test_uniform_depends_on_each_part_of_the_key_and_never_changes():
    keys = [(s, c, p) for s in (-1, 0, 1) for c in (0, 1) for p in (0, 1, 2)]
    drawn = [uniform(spec(seed=s, choice_index=c, position=p)) for s, c, p in keys]
    assert len(set(drawn)) == len(keys)
    assert all(0.0 <= value < 1.0 for value in drawn)
    # Pinned: another worker, perhaps of another version, must continue this very sequence.
    assert uniform(spec(seed=42, choice_index=1, position=7)) == 0.19264817352610486


def test_a15_choices_of_one_seed_differ_and_repeat():
    """API case A15: the seed has an effect, and n choices of one seed are not n equal texts."""
    logits = torch.zeros(1, 100_000)

    def choices(seed):
        return sample(logits, [[spec(choice_index=i, seed=seed) for i in range(8)]])[0]

    assert choices(1) == choices(1)
    assert len(set(choices(1))) == 8
    assert not set(choices(1)) & set(choices(2))


def test_extreme_logits_stay_in_range():
    logits = torch.tensor([[-1e30, 1e30, 0.0], [-INF, 3.0, -INF]])
    rows = [spec(temperature=1e-3, top_p=0.5), spec(temperature=2.0, min_p=0.1, typical_p=0.5)]
    assert tokens(logits, rows) == [1, 1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-300, 1e-30, 1e-5])
def test_the_smallest_temperatures_take_the_likeliest_token(temperature):
    logits = torch.tensor([[-3.0, 2.0, 7.5, 7.4], [1e30, -1e30, 5.0, 0.0]])
    rows = [spec(temperature=temperature, seed=3), spec(temperature=temperature, top_p=0.9)]
    assert tokens(logits, rows) == [2, 0]


def test_the_largest_draw_takes_the_last_token_that_can_be_taken(monkeypatch):
    monkeypatch.setattr("engine.sampler.choice.uniform", lambda spec: 1.0)
    assert tokens(torch.tensor([[1.0, 1.0, -INF]]), [spec()]) == [1]


def test_a_draw_of_zero_never_takes_a_filtered_token(monkeypatch):
    monkeypatch.setattr("engine.sampler.choice.uniform", lambda spec: 0.0)
    assert tokens(torch.tensor([[0.0, 1.0, 2.0]]), [spec(top_k=1)]) == [2]


# Rows without a token.


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {}, {"logit_bias": ((3, -100.0),), "presence_penalty": 1.0}]
)
def test_a_row_that_is_not_finite_has_no_token_and_its_neighbours_are_as_alone(bad, sampling):
    logits = torch.arange(15.0).reshape(3, 5)
    rows = [[spec(seed=row, output=[1], num_logprobs=2, **sampling)] for row in range(3)]
    alone = [sample(logits[row : row + 1], rows[row : row + 1])[0] for row in range(3)]
    logits[1, 3] = bad
    assert sample(logits, rows) == [alone[0], (Sampled(None),), alone[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_minus_infinities_has_no_token(temperature):
    rows = [[spec(temperature=temperature, logit_bias=((0, 1.0),))]]
    assert sample(torch.full((1, 4), -INF), rows) == [(Sampled(None),)]


def test_no_rows_and_rows_without_specs():
    assert sample(torch.empty(0, 10), []) == []
    assert sample(torch.zeros(2, 10), [[], [spec(temperature=0.0)]]) == [(), (Sampled(0),)]


# Log probabilities.


def test_logprobs_are_the_models_own():
    """Before bars, bias, penalties and temperature; the chosen token's is there though others are
    likelier."""
    logits = torch.tensor([[0.0, math.log(3.0), math.log(4.0)]])
    row = spec(
        temperature=0.0,
        allowed_token_ids=(0, 1),
        logit_bias=((0, 50.0),),
        repetition_penalty=3.0,
        output=[1, 2],
        num_logprobs=1,
    )
    ((sampled,),) = sample(logits, [[row]])
    assert (sampled.token_id, sampled.logprobs.token_id) == (0, 0)
    assert sampled.logprobs.logprob == pytest.approx(math.log(1 / 8))
    assert sampled.logprobs.top == ((2, pytest.approx(math.log(4 / 8))),)


@pytest.mark.parametrize("count", range(6))
def test_the_lower_id_of_equal_logprobs_comes_first(count):
    logits = torch.full((1, 2_000), -3.0)
    logits[0, [1_500, 20, 700, 3]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    ((sampled,),) = sample(logits, [[spec(temperature=0.0, num_logprobs=count)]])
    assert [token_id for token_id, _ in sampled.logprobs.top] == [1_500, 3, 20, 700, 0, 1][:count]


def test_more_logprobs_than_the_vocabulary_has_tokens():
    ((sampled,),) = sample(torch.tensor([[0.0, 1.0]]), [[spec(temperature=0.0, num_logprobs=20)]])
    assert [token_id for token_id, _ in sampled.logprobs.top] == [1, 0]
    assert sum(math.exp(logprob) for _, logprob in sampled.logprobs.top) == pytest.approx(1.0)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_prompt_logprobs(count):
    logits = np.random.default_rng(0).normal(size=(19, 50)).astype(np.float32)
    next_token_ids = tuple(range(0, 38, 2))
    got = prompt_logprobs(torch.from_numpy(logits), next_token_ids, count)
    for row, token_id in enumerate(next_token_ids):
        own, likeliest = reference_logprobs(logits[row], token_id, count)
        assert got[row] == TokenLogprobs(
            token_id=token_id,
            logprob=pytest.approx(own),
            top=tuple((i, pytest.approx(logprob)) for i, logprob in likeliest),
        )
    assert got[3:4] == prompt_logprobs(torch.from_numpy(logits[3:4]), next_token_ids[3:4], count)
    assert prompt_logprobs(torch.empty(0, 50), (), count) == ()
