"""Lanes of the engine that a test runs step by step, and the events of their rows."""

from dataclasses import dataclass, field

from paceline.request.profile import Sampling
from workers.engine.decode.row import Row
from workers.engine.lane.memory import MemoryEstimate
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.types import (
    Delta,
    EngineError,
    Event,
    Finished,
    PrefillProgress,
    PromptScored,
    TokenLogprob,
)

GREEDY = Sampling(temperature=0)
UNLIMITED_MEMORY = MemoryEstimate(token_bytes=1, row_bytes=1, room_bytes=1 << 30)


@dataclass(eq=False)
class RowEvents:
    row: Row = field(init=False)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Finished | EngineError | None = None

    def on_event(self, event: Event | EngineError) -> None:
        assert self.end is None, "no event follows the end"
        if isinstance(event, Delta):
            self.text += event.text
            self.logprobs += event.logprobs
        elif not isinstance(event, PrefillProgress | PromptScored):
            self.end = event


def run_until_idle(*lanes: LaneScheduler) -> None:
    while any(lane.busy for lane in lanes):
        for lane in lanes:
            lane.step()
