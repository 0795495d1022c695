"""Order in which the open prompts of an engine are read, a chunk at a time; pure.

The prompt with the fewest tokens left comes first (shortest remaining processing time, Schrage
1968): a short question overtakes a long document, which loses no more than the question takes. A
few chunks in a row may be read out of turn; then the prompt that has waited longest gets one, so
that every prompt moves however many short ones come.

All lanes of an engine share one queue, and the device: while rows decode, no lane reads twice
between two of their steps.
"""

from collections.abc import Callable, Iterator

from workers.engine.decode.prefill import Prefill

MAX_OVERTAKES = 3
"""Chunks in a row that are read out of turn."""


class PrefillQueue:
    """Open prompts of all lanes."""

    def __init__(self) -> None:
        self._prompts: list[tuple[str, Prefill]] = []
        """With their lanes; first the one whose last chunk, or arrival, is the longest ago."""
        self._overtakes = 0
        """Chunks that have overtaken other prompts since one was read in turn."""
        self._delayed = False
        """Whether nothing was decoded since the last chunks."""

    def __iter__(self) -> Iterator[Prefill]:
        return (prompt for _, prompt in self._prompts)

    def of(self, lane: str) -> list[Prefill]:
        """Return the open prompts of one lane."""
        return [prompt for owner, prompt in self._prompts if owner == lane]

    def add(self, lane: str, prompt: Prefill) -> None:
        """Add a prompt of a lane."""
        self._prompts.append((lane, prompt))

    def remove(self, lane: str, ended: Callable[[Prefill], bool] = lambda _: True) -> list[Prefill]:
        """Remove and return the prompts of a lane that have ended."""
        removed = [prompt for prompt in self.of(lane) if ended(prompt)]
        self._prompts = [entry for entry in self._prompts if entry[1] not in removed]
        return removed

    def next(self, lane: str, *, decoding: bool) -> Prefill | None:
        """Return the prompt to read now; None if it is another lane's, or rows must decode first.

        `decoding` says whether there are any.
        """
        if not self._prompts or (self._delayed and decoding):
            return None
        owner, prompt = self._prompts[0]
        if self._overtakes < MAX_OVERTAKES:
            owner, prompt = min(self._prompts, key=lambda entry: entry[1].remaining_tokens)
        return prompt if owner == lane else None

    def record_chunk(self, prompt: Prefill) -> None:
        """Record that a chunk of a prompt has been read."""
        at = next(at for at, (_, other) in enumerate(self._prompts) if other is prompt)
        self._overtakes = self._overtakes + 1 if at else 0
        self._prompts.append(self._prompts.pop(at))

    def end_reading(self) -> None:
        """Let the rows decode before a prompt is read again."""
        self._delayed = True

    def record_decode(self) -> None:
        """Record that the rows have decoded one step."""
        self._delayed = False
