"""One answer while it is being made: the only mutable record of the engine.

Draft and verify counts of one answer, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from policies.request.profile import Bypass
from workers.engine.detokenizer import TextStream
from workers.engine.prefix_cache_files import HostPrefix
from workers.engine.sampler import SamplingContext
from workers.engine.tokenizer import PreparedPrompt
from workers.engine.types import (
    Delta,
    DraftStep,
    EngineError,
    Event,
    Finished,
    FinishReason,
    Generation,
    TokenLogprob,
    Usage,
)
from workers.protocol import Speculation


class SpeculationCounter:
    """Draft and verify counts of one row, step by step."""

    def __init__(self, draft_tokens: int) -> None:
        self._draft_tokens = draft_tokens
        self._histogram = [0] * (draft_tokens + 1)
        self._steps: list[DraftStep] = []
        self._drafted = 0
        self._accepted = 0
        self._errors = 0

    @property
    def steps(self) -> tuple[DraftStep, ...]:
        """Name the verifies of this row's drafts, in order."""
        return tuple(self._steps)

    @property
    def step_count(self) -> int:
        """Count them, in no time."""
        return len(self._steps)

    def record_step(self, drafted: int, accepted: int) -> None:
        """Count one verify of this row's draft."""
        self._steps.append(DraftStep(drafted=drafted, accepted=accepted))
        self._drafted += drafted
        self._accepted += accepted
        self._histogram[accepted] += 1

    def record_errors(self, drafted: int) -> None:
        """Count draft tokens that were wanted and never came."""
        self._drafted += drafted
        self._errors += drafted

    def total(self) -> Speculation:
        """Return the counts so far."""
        if not self._draft_tokens:
            return Speculation()
        return Speculation(
            num_spec_tokens=self._draft_tokens,
            steps=len(self._steps),
            drafted=self._drafted,
            accepted=self._accepted,
            errors=self._errors,
            histogram=tuple(self._histogram),
        )


EventSink = Callable[[Event | EngineError], None]
DELTA_INTERVAL_S = 0.01
"""Between two pieces of an answer at least. Each costs the worker, the gateway and the client more
than a token costs a small model, and nobody reads a hundred of them in a second."""


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """A generation in a lane: what was asked, what came out so far, and where it is heard."""

    generation: Generation
    prompt: PreparedPrompt
    seed: int
    max_tokens: int
    draft_tokens: int
    """The most this row may be drafted at a time; 0 for one that must not speculate."""
    draft_tokens_fixed: bool = False
    """Whether the request named its k: then it gets just that, paying or not."""
    bypass: tuple[Bypass, ...] = ()
    """Why it must not speculate, for the lane's counts."""
    text: TextStream
    speculation: SpeculationCounter
    sink: EventSink
    answer: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cancelled: bool = False
    drafting_skipped: bool = False
    """Whether the lane drafted nothing for it at some time, as that was measured not to pay."""
    suspect: bool = False
    """Whether it was in a plain round that failed: it then decodes in a batch of its own."""
    cached_tokens: int = 0
    """Prompt tokens that came out of a snapshot instead of being read."""
    skipped_tokens: int = 0
    """Prompt tokens that are never read: a draft model found that they do not matter."""
    prefetched: HostPrefix | None = None
    """What disk had of the prompt's beginning, until the prefill begins."""
    position_offset: int = 0
    """Token number to text position; pictures take fewer positions than tokens."""
    _last_delta_s: float = -inf
    _pending_text: str = ""
    _pending_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def context_tokens(self) -> int:
        """Count the tokens behind the next one: all but the last one of the answer."""
        return len(self.prompt.tokens) + max(len(self.answer) - 1, 0)

    @property
    def slots_used(self) -> int:
        """Count the tokens that the caches of a joined row hold."""
        return self.context_tokens - self.skipped_tokens

    def slots_after(self, tokens: int) -> int:
        """Count the slots it uses once it has grown by so many tokens, or has ended before."""
        return self.slots_used + min(tokens, max(self.max_tokens - len(self.answer), 0))

    def draft_limit(self, k: int) -> int:
        """Count the tokens to draft next where the lane would draft k.

        No more than can be used: one token comes with the verify anyway.
        """
        wanted = self.draft_tokens if self.draft_tokens_fixed else min(k, self.draft_tokens)
        return max(min(wanted, self.max_tokens - len(self.answer) - 1), 0)

    def sampling_context(self) -> SamplingContext:
        """Describe to the sampler how the next token of this row is chosen."""
        return SamplingContext(
            sampling=self.generation.sampling,
            seed=self.seed,
            position=len(self.answer),
            prompt=self.prompt.tokens,
            answer=self.answer,
        )

    def usage(self) -> Usage:
        """Count the tokens so far, the end token included, as vLLM does."""
        return Usage(
            prompt_tokens=len(self.prompt.tokens),
            completion_tokens=len(self.answer),
            cached_tokens=self.cached_tokens,
            skipped_tokens=self.skipped_tokens,
        )

    def append_tokens(
        self,
        tokens: Sequence[int],
        ends: Iterable[int],
        logprobs: Sequence[TokenLogprob] = (),
        *,
        now_s: float,
    ) -> int:
        """Take the tokens of one step up to the end of the answer; return how many were taken.

        The text they make certain goes to the sink in one piece: at once, or with that of the next
        steps where the last piece is younger than `DELTA_INTERVAL_S`.
        """
        taken = 0
        text = ""
        for token in tokens:
            if logprobs:
                begin = self.text.decided_chars
                self._pending_logprobs.append(replace(logprobs[taken], offset_chars=begin))
            taken += 1
            self.answer.append(token)
            if token in ends:
                self.finish_reason = FinishReason.STOP
            else:
                text += self.text.push(token)
                if self.text.stopped:
                    self.finish_reason = FinishReason.STOP
                elif len(self.answer) >= self.max_tokens:
                    self.finish_reason = FinishReason.LENGTH
            if self.finish_reason:
                break
        if self.finish_reason:
            text += self.text.flush()
        self._pending_text += text
        if self.finish_reason or now_s - self._last_delta_s >= DELTA_INTERVAL_S:
            self._emit_delta(now_s)
        return taken

    def _emit_delta(self, now_s: float) -> None:
        if self._pending_text or self._pending_logprobs:
            self.sink(Delta(text=self._pending_text, logprobs=tuple(self._pending_logprobs)))
            self._last_delta_s, self._pending_text, self._pending_logprobs = now_s, "", []

    def finished_event(self) -> Finished:
        """Describe the end of the answer."""
        assert self.finish_reason is not None
        return Finished(
            reason=self.finish_reason,
            usage=self.usage(),
            speculation=self.speculation.total(),
            steps=self.speculation.steps,
        )
