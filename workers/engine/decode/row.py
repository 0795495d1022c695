"""Row of a lane: one generation from admission to its end, and its speculation counts."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from typing import NamedTuple

from paceline.protocol import ANSWER_FIELD, RUNNING_USAGE_TOKENS, DraftSource, Speculation
from paceline.request.profile import Bypass
from workers.engine import types
from workers.engine.decode.draft_length import Accepted
from workers.engine.decode.prompt_lookup import Found, PromptLookup
from workers.engine.decode.sampler import PromptLogprobs, SamplingContext, TokenCounts
from workers.engine.prefix.files import Prefetched
from workers.engine.text.detokenizer import TextStream
from workers.engine.text.grammar import Matcher, TokenRules
from workers.engine.text.reasoning import ANSWERING, Part, Reasoning
from workers.engine.text.tokenizer import PreparedPrompt

EventSink = Callable[[types.Event | types.EngineError], None]
DELTA_INTERVAL_S = 0.01
"""Minimum time between two deltas of an answer. A delta costs the worker, the gateway and the
client more than a token costs a small model, and no reader needs a hundred in a second."""


@dataclass(slots=True)
class SpeculationCounter:
    """Draft and verify counts of one row, step by step."""

    draft_tokens: int = 0
    """The least that is reported as the length of the longest draft."""
    steps: list[types.DraftStep] = field(default_factory=list)
    """Verified drafts, in order."""
    lost: list[DraftSource] = field(default_factory=list)
    """Sources of the tokens of failed drafts."""
    drafted: Counter[str] = field(default_factory=Counter)
    """Draft tokens by source, those of failed drafts too."""
    accepted: Counter[str] = field(default_factory=Counter)
    given: "SpeculationCounter | None" = None
    """The counts of another worker for this answer."""

    def add_step(self, sources: Sequence[DraftSource], accepted: int) -> None:
        """Count a verified draft whose tokens have these sources."""
        self.steps.append(types.DraftStep(len(sources), accepted))
        self.drafted.update(source.value for source in sources)
        self.accepted.update(source.value for source in sources[:accepted])

    def add_errors(self, sources: Sequence[DraftSource]) -> None:
        """Count a draft that failed."""
        self.lost += sources
        self.drafted.update(source.value for source in sources)

    def total(self, *, own: bool = False) -> Speculation:
        """Return the counts of the answer so far; with `own`, only those of this worker."""
        given = self.given if own and self.given else SpeculationCounter(self.draft_tokens)
        steps, errors = self.steps[len(given.steps) :], len(self.lost) - len(given.lost)
        longest = max([self.draft_tokens, *(step.drafted for step in steps)])
        if not longest and not errors:
            return Speculation()
        histogram = Counter(step.accepted for step in steps)
        return Speculation(
            num_spec_tokens=longest,
            steps=len(steps),
            drafted=sum(step.drafted for step in steps) + errors,
            accepted=sum(step.accepted for step in steps),
            errors=errors,
            histogram=tuple(histogram[accepted] for accepted in range(longest + 1)),
            drafted_by_source=dict(self.drafted - given.drafted),
            accepted_by_source=dict(self.accepted - given.accepted),
        )


@dataclass(slots=True)
class PendingTokens:
    """Tokens of one answer that wait for the end of their text.

    The texts of all tokens, joined, are the text of the answer.
    """

    _ends: deque[tuple[int, DraftSource | None]] = field(default_factory=deque)
    """For each token the characters of the answer up to its end, and who drafted it."""
    _text: str = ""
    """Text of the answer that belongs to pending tokens."""
    _begin_chars: int = 0
    """Where it begins."""

    def append(self, end_chars: int, source: DraftSource | None) -> None:
        """Append a token whose text ends after this many characters of the decoded text."""
        self._ends.append((end_chars, source))

    def release(self, text: str, *, final: bool) -> tuple[types.SourcedToken, ...]:
        """Take the next text of the answer; return the tokens that it completes.

        At the end these are all tokens; a stop string leaves the last ones less text or none.
        """
        self._text += text
        released = []
        while self._ends:
            end_chars, source = self._ends[0]
            length = end_chars - self._begin_chars
            if length > len(self._text) and not final:
                break
            self._ends.popleft()
            released.append(types.SourcedToken(self._text[:length], source))
            self._begin_chars, self._text = end_chars, self._text[length:]
        return tuple(released)


class LoadedRange(NamedTuple):
    """Tokens of a prompt that the prefix cache has got from elsewhere for this row."""

    kind: str
    """As the lane counts them."""
    begin: int
    end: int


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """A generation in a lane: its request, its answer so far, and the sink of its events."""

    generation: types.Generation
    prompt: PreparedPrompt
    seed: int
    max_tokens: int
    ends: frozenset[int]
    """Tokens that end the answer."""
    draft_tokens: int
    """Maximum draft length; 0 for a row that must not speculate."""
    draft_tokens_fixed: bool = False
    """Whether the request names its draft length: it then applies even where it does not pay."""
    with_head: bool = True
    """Whether the MTP head may draft; False without one, or after it failed."""
    looks_up: bool = False
    """Whether prompt lookup may draft."""
    further_tokens: Sequence[int] = ()
    """Tokens that the head drafts for this row besides its shortlist, once they are known."""
    lookup: PromptLookup | None = None
    """Its index, once the prompt has been read."""
    bypass: tuple[Bypass, ...] = ()
    """Reasons why the row must not speculate, for the lane's counts."""
    matcher: Matcher | None = None
    """The grammar that decides which tokens may come next; None for an answer of any form."""
    text: TextStream
    reasoning: Reasoning | None = None
    """None if the text contains whatever the model writes."""
    speculation: SpeculationCounter = field(default_factory=SpeculationCounter)
    head_accepted: Accepted = field(default_factory=list)
    sink: EventSink = lambda _: None
    counts: TokenCounts = field(default_factory=TokenCounts)
    """Of the tokens so far, for penalties."""
    prompt_logprobs: PromptLogprobs | None = None
    """None unless the generation asks for them."""
    answer: list[int] = field(default_factory=list)
    """Tokens of the answer so far."""
    replayed: deque[int] = field(default_factory=deque)
    """Next tokens of an exact answer whose caches are lost: steps decode them again."""
    given_tokens: int = 0
    """The first tokens of the answer, which another worker has generated."""
    finish_reason: types.FinishReason | None = None
    cancelled: bool = False
    drafting_skipped: bool = False
    """Whether the lane drafted nothing at some step, since drafting did not pay."""
    arrival: int = field(default_factory=count().__next__)
    """Its place among all rows of the process, in the order in which they came."""
    starved: bool = False
    """Whether an allocation failed although no other row took memory."""
    suspect: bool = False
    """Whether a plain step with this row failed; the row then decodes in its own batch."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    cached_kinds: dict[str, int] = field(default_factory=dict)
    """These tokens by kind, as the lane counts them."""
    stored_tokens: int = 0
    """Length of the beginning of the prompt that the prefix cache has stored."""
    stored: bool = False
    """Whether the prefix cache was asked to store the ended answer, and so all of the prompt."""
    skipped_tokens: int = 0
    """Prompt tokens that the target never reads, since a draft model found them unimportant."""
    cacheable: bool = False
    """Whether the prefix cache may store the row's caches: they agree with its tokens."""
    expected_tokens: int = 0
    """Prompt tokens in the prefix cache when the row was queued, or later."""
    held_tokens: int = 0
    """The most of these, until the row is read."""
    reloading: Future[list[Prefetched]] | None = None
    """Reading from disk of nodes that were evicted meanwhile."""
    prefetched: Sequence[Prefetched] = ()
    """Beginning of the prompt, read from disk; empty again once it is in memory."""
    loaded: list[LoadedRange] = field(default_factory=list)
    """Nodes of the prompt that were read into memory for this row before its prefill."""
    position_offset: int = 0
    """Difference from token number to text position: pictures take fewer positions than tokens."""
    _first_tokens: int = 0
    """Those of the first step of this worker, at `_begun_s`; the rest took until `_ended_s`."""
    _begun_s: float = 0.0
    _ended_s: float = 0.0
    _last_delta_s: float = -inf
    _reported_tokens: int = 0
    """Tokens of the answer at the last delta."""
    _pending_text: str = ""
    _pending_reasoning: str = ""
    _pending_logprobs: list[types.TokenLogprob] = field(default_factory=list)
    _pending_tokens: PendingTokens | None = None
    """None unless the generation asks for `token_sources`."""
    _pending_steps: list[types.TokenStep] = field(default_factory=list)
    _reported_errors: int = 0

    def __post_init__(self) -> None:
        if self.generation.token_sources:
            self._pending_tokens = PendingTokens()

    @property
    def context_tokens(self) -> int:
        """Count the tokens before the next one: the prompt and all of the answer but its last."""
        return len(self.prompt.tokens) + max(len(self.answer) - 1, 0)

    @property
    def uses_head(self) -> bool:
        """Return whether the MTP head drafts for this row."""
        return self.draft_tokens > 0 and self.with_head

    @property
    def begun(self) -> bool:
        """Return whether a token of the answer was generated here."""
        return len(self.answer) > self.given_tokens

    @property
    def slots_used(self) -> int:
        """Count the tokens that the caches of a joined row hold."""
        return self.context_tokens - self.skipped_tokens

    def slots_after(self, tokens: int) -> int:
        """Count the slots in use after up to `tokens` further tokens of the answer."""
        return self.slots_used + min(tokens, max(self.max_tokens - len(self.answer), 0))

    # --- what the next step drafts and chooses by -------------------------------------------------

    @property
    def _draft_room(self) -> int:
        """Return the longest draft that fits before the token of the verify itself."""
        return max(self.max_tokens - len(self.answer) - 1, 0)

    def draft_limit(self, k: int) -> int:
        """Return the length of the next draft in a lane that drafts k tokens."""
        wanted = self.draft_tokens if self.draft_tokens_fixed else min(k, self.draft_tokens)
        return min(wanted, self._draft_room)

    def look_up(self, limit: int) -> Found | None:
        """Return up to `limit` tokens that prompt lookup drafts; None if it finds none."""
        if self.lookup is None or not self.draft_tokens:
            return None
        most = min(limit, self.draft_tokens) if self.draft_tokens_fixed else limit
        return self.lookup.find(min(most, self._draft_room))

    def forced_tokens(self) -> Sequence[int]:
        """Return the next tokens that the grammar forces, if a draft may have them.

        Returns none for a request that names its draft length.
        """
        if self.matcher is None or self.draft_tokens_fixed:
            return ()
        if self.reasoning is not None and not self.reasoning.state.next_token().answering:
            return ()
        return self.matcher.forced()[: self._draft_room]

    def token_rules(self, tokens: int) -> TokenRules | None:
        """Return the constraint of the next `tokens` + 1 tokens; None if they are free."""
        state = self.reasoning.state if self.reasoning else None
        missing = 0 if self.matcher else max(self.generation.min_tokens - len(self.answer), 0)
        if not missing and not self.matcher and (state is None or not state.may_force(tokens)):
            return None
        return TokenRules(self.matcher, state, missing, self.ends)

    def sampling_context(self) -> SamplingContext:
        """Return the sampler's input for the next token."""
        return SamplingContext(
            sampling=self.generation.sampling,
            seed=self.seed,
            prompt=self.prompt.tokens,
            answer=self.answer,
            counts=self.counts,
        )

    # --- the answer -------------------------------------------------------------------------------

    def append_tokens(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[types.TokenLogprob] = (),
        sources: Sequence[DraftSource] = (),
        *,
        now_s: float,
    ) -> int:
        """Append the tokens of one step up to the end of the answer; return how many fitted.

        All tokens of a step but its last are drafts that the target accepted; `sources` says where
        all tokens of the draft come from. An accepted draft behind the end of the answer counts as
        rejected, so that the counts add up to `completion_tokens`. The sink gets the decoded text
        in one delta: at once, or together with the text of the next steps if the last delta is
        younger than `DELTA_INTERVAL_S`.
        """
        if self.replayed:
            self.answer.append(self.replayed.popleft())
            return 1
        drafts = len(tokens) - 1
        appended = self._append(tokens, logprobs, sources, drafts, now_s)
        if not self._first_tokens:
            self._begun_s, self._first_tokens = now_s, appended
        self._ended_s = now_s
        if self.generation.report_steps:
            kept, accepted = tuple(tokens[:appended]), min(appended, drafts)
            self._pending_steps.append(types.TokenStep(kept, tuple(sources), accepted))
        if self.finish_reason or now_s - self._last_delta_s >= DELTA_INTERVAL_S:
            self._emit_delta(now_s)
        return appended

    def replay(self) -> None:
        """Let steps decode all tokens but the first again, and so fill the caches as before.

        Reading them in one pass would round otherwise. All other states stay as they are.
        """
        tokens = [*self.answer, *self.replayed]
        self.answer, self.replayed = tokens[:1], deque(tokens[1:])

    def restore(self, given: types.GivenAnswer) -> Sequence[types.Delta]:
        """Take the beginning of the answer as another worker has generated it; return its deltas.

        All states are then as that worker had them. Raise `InvalidGeneration` if no answer to the
        request begins so.
        """
        deltas: list[types.Event | types.EngineError] = []
        sink, self.sink, fits = self.sink, deltas.append, True
        for tokens, sources, accepted in given.steps:
            if not tokens:
                self.speculation.add_errors(sources)
            elif fits := fits and not self.finish_reason:
                fits = self._append(tokens, (), sources, accepted, 0.0) == len(tokens)
        if not fits or (given.finished and not self.finish_reason):
            raise types.InvalidGeneration(
                ANSWER_FIELD, "No answer to this request begins with these tokens."
            )
        self._emit_delta(0.0)
        self.sink, self._last_delta_s = sink, -inf
        self._pending_steps, self._reported_tokens = [], len(self.answer)
        self.given_tokens = len(self.answer)
        self.speculation.given = deepcopy(self.speculation)
        self._reported_errors = len(self.speculation.lost)
        return [replace(one, given=True) for one in deltas if isinstance(one, types.Delta)]

    def end(self, reason: types.FinishReason, *, now_s: float) -> None:
        """End the answer where another engine has ended it."""
        self.finish_reason = reason
        self._flush()
        self._emit_delta(now_s)

    def usage(self) -> types.Usage:
        """Return the token counts so far, the end token included, as vLLM does."""
        prompt_tokens, stored_tokens = len(self.prompt.tokens), self.stored_tokens
        if self.cacheable and not (self.stored or self.skipped_tokens):
            stored_tokens = prompt_tokens  # so that all usages of one answer say the same
        return types.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=len(self.answer),
            cached_tokens=self.cached_tokens,
            written_tokens=max(stored_tokens - self.cached_tokens, 0),
            system_tokens=self.prompt.prefix.tokens if self.prompt.prefix else 0,
            skipped_tokens=self.skipped_tokens,
            reasoning_tokens=self.reasoning.state.reasoning_tokens if self.reasoning else 0,
        )

    def finished_event(self) -> types.Finished:
        """Return the event that ends the answer."""
        assert self.finish_reason is not None
        last = self.answer[-1] if self.answer else None
        return types.Finished(
            reason=self.finish_reason,
            usage=self.usage(),
            speculation=self.speculation.total(),
            steps=tuple(self.speculation.steps),
            timed_tokens=len(self.answer) - self.given_tokens - self._first_tokens,
            generation_s=self._ended_s - self._begun_s,
            stop=self.text.stopped_by or (last if last in self.generation.stop_tokens else None),
        )

    def _append(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[types.TokenLogprob],
        sources: Sequence[DraftSource],
        accepted: int,
        now_s: float,
    ) -> int:
        """Append tokens up to the end of the answer, the first ones drafts; return how many."""
        appended = 0
        for token in tokens:
            begin = self.text.decided_chars
            ended = token in self.ends
            part = self._read(token, ended=ended, now_s=now_s)
            if logprobs and part is Part.ANSWER:
                self._pending_logprobs.append(replace(logprobs[appended], offset_chars=begin))
            appended += 1
            self.answer.append(token)
            complete = self.matcher is not None and self.matcher.complete
            if ended or complete or self.text.stopped_by is not None:
                self.finish_reason = types.FinishReason.STOP
            elif len(self.answer) >= self.max_tokens:
                self.finish_reason = types.FinishReason.LENGTH
            if self.finish_reason:
                self._flush()
            if self._pending_tokens is not None:
                end = self.text.decided_chars
                end += self.reasoning.text.decided_chars if self.reasoning else 0
                source = sources[appended - 1] if appended <= accepted else None
                self._pending_tokens.append(end, source)
            if self.finish_reason:
                break
        if self.lookup is not None:
            self.lookup.extend(tokens[:appended])
        if sources:
            self.speculation.add_step(sources, min(appended, accepted))
        return appended

    def _read(self, token: int, *, ended: bool, now_s: float) -> Part:
        """Take one token; add its text to that of its part, which this returns."""
        place, part = ANSWERING, Part.ANSWER
        tokens: Sequence[int] = (token,)
        if self.reasoning is not None:
            place = self.reasoning.state.next_token()
            if not ended:
                part, tokens = self.reasoning.state.push(token)
        if self.matcher is not None and place.answering and token != place.beginning:
            self.matcher.advance(token)
        if ended:
            return Part.ANSWER  # though it has no text
        if part is Part.MARK:
            self._flush()
        elif part is Part.REASONING and self.reasoning is not None:
            if self._pending_text:  # text comes after reasoning in a delta
                self._emit_delta(now_s, partial=True)
            self._pending_reasoning += "".join(map(self.reasoning.text.push, tokens))
        else:
            self._pending_text += "".join(map(self.text.push, tokens))
        return part

    def _flush(self) -> None:
        """Add the text that was held back; the next token begins another part, or none comes."""
        if self.reasoning is not None:
            self._pending_reasoning += self.reasoning.text.flush()
        self._pending_text += self.text.flush()

    def _emit_delta(self, now_s: float, *, partial: bool = False) -> None:
        # Also without text: a gateway charges a stream that is left by its last delta.
        unreported = len(self.answer) - self._reported_tokens
        text, reasoning = self._pending_text, self._pending_reasoning
        final, tokens = self.finish_reason is not None, tuple[types.SourcedToken, ...]()
        if self._pending_tokens is not None:
            tokens = self._pending_tokens.release(reasoning + text, final=final)
        if not (
            text or reasoning or self._pending_logprobs or tokens
            or unreported >= RUNNING_USAGE_TOKENS
            or (final and self._pending_steps)
        ):  # fmt: skip
            return
        steps = self._pending_steps
        if lost := self.speculation.lost[self._reported_errors :]:
            steps.append(types.TokenStep((), tuple(lost)))
            self._reported_errors += len(lost)
        self.sink(
            types.Delta(
                text=text,
                reasoning=reasoning,
                logprobs=tuple(self._pending_logprobs),
                tokens=tokens,
                usage=self.usage(),
                steps=tuple(steps),
                partial=partial,
            )
        )
        self._last_delta_s, self._reported_tokens = now_s, len(self.answer)
        self._pending_text = self._pending_reasoning = ""
        self._pending_logprobs, self._pending_steps = [], []
