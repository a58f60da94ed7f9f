"""Beam search: the likeliest continuations of one prompt, all beams over shared blocks.

`Hypotheses` is the pure search, with the rules of Hugging Face's generate(num_beams=...), which
tests compare it with. `BeamGroup` keeps one sequence per live beam in step: a beam that has its
candidates waits ("parked", with its blocks) until all have, then the best candidates of all become
the next beams, which share their parents' blocks. A parked beam may lose its blocks; what becomes
of it is then computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from core.errors import InvalidRequestError
from core.request import MAX_CHOICES, FinishReason, GenerateRequest, TokenChunk
from core.sampling_params import SamplingParams
from engine.block_pool import BlockPool
from engine.sequence import Sequence as EngineSequence

MAX_LENGTH_PENALTY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Raises InvalidRequestError when a value is out of range."""

    beam_width: int
    length_penalty: float = 1.0
    """An answer of n tokens scores (sum of log probabilities) / n ** length_penalty."""
    early_stopping: bool | Literal["never"] = False
    """True: stop when beam_width answers are there. False: when the best live beam could not beat
    the worst of them at its present length; "never": at its best possible length."""

    def __post_init__(self) -> None:
        if not isinstance(self.beam_width, int) or not 1 <= self.beam_width <= MAX_CHOICES:
            raise InvalidRequestError(
                f"beam_width must be between 1 and {MAX_CHOICES}", param="beam_width"
            )
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:  # nor NaN
            raise InvalidRequestError(
                f"length_penalty must be in [-{MAX_LENGTH_PENALTY}, {MAX_LENGTH_PENALTY}]",
                param="length_penalty",
            )
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequestError(
                'early_stopping must be true, false or "never"', param="early_stopping"
            )


_USED = ("temperature", "seed", "max_tokens", "stop_token_ids", "ignore_eos")
"""Sampling parameters that a search honours, or that have nothing to say where nothing is drawn."""


def _check_plain(sampling: SamplingParams) -> None:
    for item in fields(sampling):
        if item.name not in _USED and getattr(sampling, item.name) != item.default:
            message = f"{item.name} has no meaning in a beam search"
            raise InvalidRequestError(message, param=item.name)


class Continuation(NamedTuple):
    parent: int
    """Index of the live beam it goes on from."""
    token_id: int
    score: float
    """Sum of the log probabilities of all its tokens."""


class Answer(NamedTuple):
    score: float
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


class Hypotheses:
    """Finished answers of one search and when to stop looking for more."""

    def __init__(
        self, params: BeamSearchParams, eos_token_ids: Sequence[int], max_tokens: int
    ) -> None:
        self._params = params
        self._eos = frozenset(eos_token_ids)
        self._max_tokens = max_tokens
        self.answers: list[Answer] = []
        """Best first, at most beam_width."""

    @property
    def num_candidates(self) -> int:
        """Of each beam: so many that beam_width are left if all others end."""
        return self._params.beam_width + len(self._eos)

    def advance(
        self, beams: Sequence[tuple[int, ...]], candidates: Sequence[Continuation]
    ) -> list[Continuation]:
        """One step: `beams` are the live beams' output tokens, `candidates` continue them. Returns
        the next live beams, best first; none when the search is over."""
        width, num_tokens = self._params.beam_width, len(beams[0]) + 1
        best = sorted(candidates, key=lambda c: -c.score)
        live = [c for c in best if self._end(c.token_id, num_tokens) is None]
        self._add(
            Answer(
                score=c.score / num_tokens**self._params.length_penalty,
                token_ids=(*beams[c.parent], c.token_id),
                finish_reason=reason,
            )
            for c in best[:width]
            if (reason := self._end(c.token_id, num_tokens)) is not None
        )
        return live[:width] if live and self._may_improve(live[0].score, num_tokens) else []

    def _end(self, token_id: int, num_tokens: int) -> FinishReason | None:
        if token_id in self._eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self._max_tokens else None

    @property
    def _is_full(self) -> bool:
        return len(self.answers) >= self._params.beam_width

    def _add(self, answers: Iterable[Answer]) -> None:
        if self._is_full and self._params.early_stopping is True:
            return
        ordered = sorted((*self.answers, *answers), key=lambda answer: -answer.score)
        self.answers = ordered[: self._params.beam_width]

    def _may_improve(self, best_score: float, num_tokens: int) -> bool:
        if not self._is_full:
            return True
        if self._params.early_stopping is True:
            return False
        penalty = self._params.length_penalty
        far = self._params.early_stopping == "never" and penalty > 0
        length = self._max_tokens if far else num_tokens
        return bool(best_score / length**penalty > self.answers[-1].score)


@dataclass(slots=True)
class Beam:
    sequence: EngineSequence
    score: float = 0.0
    is_parked: bool = False


@dataclass(slots=True)
class BeamGroup:
    """The sequences of one search. They leave the schedulers with their candidates; `collect` takes
    them until all are here."""

    request: GenerateRequest
    hypotheses: Hypotheses
    beams: list[Beam]
    num_made: int = 1
    """Sequences so far, to number them."""

    @classmethod
    def start(
        cls,
        request: GenerateRequest,
        params: BeamSearchParams,
        sequence: EngineSequence,
        max_model_len: int,
    ) -> BeamGroup:
        """Raises InvalidRequestError for more choices than beams, and for what a search has no use
        for."""
        _check_plain(request.sampling)
        if request.num_choices > params.beam_width:
            raise InvalidRequestError("n must not exceed beam_width", param="n")
        room = max_model_len - len(request.prompt_token_ids)
        max_tokens = min(request.sampling.max_tokens, room)
        hypotheses = Hypotheses(params, request.ending_token_ids, max_tokens)
        sequence.num_choices = 1
        sequence.num_candidates = hypotheses.num_candidates
        return cls(request, hypotheses, [Beam(sequence)])

    def collect(self, sequence: EngineSequence, pool: BlockPool) -> list[EngineSequence]:
        """A beam's candidates are known. Returns the next beams when it was the last one, those
        without blocks to be read anew; none when the search is over."""
        for beam in self.beams:
            beam.is_parked = beam.is_parked or beam.sequence is sequence
        if not all(beam.is_parked for beam in self.beams):
            return []
        candidates = [
            Continuation(parent, token_id, beam.score + logprob)
            for parent, beam in enumerate(self.beams)
            for token_id, logprob in beam.sequence.candidates
        ]
        outputs = [beam.sequence.output_token_ids for beam in self.beams]
        parents = self.beams
        chosen = self.hypotheses.advance(outputs, candidates)
        self.beams = [self._child(parents[c.parent], c, pool) for c in chosen]
        for parent in parents:
            parent.sequence.release(pool)
        return [beam.sequence for beam in self.beams]

    def _child(self, parent: Beam, chosen: Continuation, pool: BlockPool) -> Beam:
        sequence = parent.sequence.fork(self.num_made, pool)
        self.num_made += 1
        sequence.num_candidates = parent.sequence.num_candidates
        sequence.token_ids.append(chosen.token_id)
        return Beam(sequence, chosen.score)

    @property
    def is_over(self) -> bool:
        return not self.beams

    def release_parked(self, pool: BlockPool) -> bool:
        """Give the blocks of waiting beams back; False when there were none."""
        held = [beam.sequence for beam in self.beams if beam.is_parked and beam.sequence.block_ids]
        for sequence in held:
            sequence.release(pool)
        return bool(held)

    def choices(self) -> list[TokenChunk]:
        """The best answers, best first."""
        return [
            TokenChunk(
                token_ids=answer.token_ids,
                finish_reason=answer.finish_reason,
                score=answer.score,
            )
            for answer in self.hypotheses.answers[: self.request.num_choices]
        ]
