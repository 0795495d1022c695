"""Score any OpenAI endpoint that serves the checkpoint.

Run it by `python -m tools.demo_model.score --url URL`. Each part is a function of an
`httpx.Client`, so that a test can call it and check the result.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tools.demo_model import held_out
from tools.demo_model.held_out import Prompt
from tools.demo_model.pictures import Picture
from tools.demo_model.world import PICTURE_COLOURS, PICTURE_SHAPES

MAX_ANSWER_TOKENS: Final = 1000
CONCURRENCY: Final = 8
"""Concurrent requests: a batch costs little more than one row, with the same answers."""
Show = Callable[[Iterable[Any], str], Iterable[Any]]


@dataclass
class Drafts:
    """Draft tokens that an endpoint reported, summed over answers."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    reports: int = 0

    def add(self, metrics: dict[str, Any]) -> None:
        """Add the `metrics.speculative_decoding` of one answer."""
        self.drafted += metrics["num_draft_tokens"]
        self.accepted += metrics["num_accepted_draft_tokens"]
        self.steps += metrics["num_spec_steps"]
        self.reports += 1

    @property
    def rate(self) -> float | None:
        """Return the accepted share of draft tokens, or None without drafts."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True)
class Reply:
    """An answer of the endpoint."""

    text: str
    finish_reason: str
    tokens: int
    speculation: dict[str, Any] | None


@dataclass
class Score:
    """Numbers of prompts and correct answers, the drafts of the answers and the mistakes."""

    name: str
    prompts: int = 0
    correct: int = 0
    tokens: int = 0
    drafts: Drafts = field(default_factory=Drafts)
    mistakes: list[tuple[str, str]] = field(default_factory=list)

    def add(self, reply: Reply, *, correct: bool, expected: str) -> None:
        """Count one reply."""
        self.prompts += 1
        self.correct += correct
        self.tokens += reply.tokens
        if reply.speculation is not None:
            self.drafts.add(reply.speculation)
        if not correct:
            self.mistakes.append((expected, reply.text))

    @property
    def share(self) -> float:
        """Return the share of correct answers."""
        return self.correct / self.prompts if self.prompts else 0.0


def send_prompt(client: httpx.Client, model: str, prompt: Prompt) -> Reply:
    """Send one prompt at temperature 0."""
    body = {
        "model": model,
        "messages": list(prompt.messages),
        "temperature": 0,
        "max_tokens": MAX_ANSWER_TOKENS,
    }
    response = client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    answer = response.json()
    choice = answer["choices"][0]
    metrics = (answer.get("metrics") or {}).get("speculative_decoding")
    usage = answer.get("usage") or {}
    tokens = usage.get("completion_tokens") or usage.get("output_tokens") or 0
    text = choice["message"].get("content") or ""
    return Reply(text, choice["finish_reason"], tokens, metrics)


def send_prompts(client: httpx.Client, model: str, prompts: Iterable[Prompt]) -> list[Reply]:
    """Send all prompts concurrently; return the answers in the order of the prompts."""
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(partial(send_prompt, client, model), prompts))


def score_answers(client: httpx.Client, model: str, prompts: Sequence[Prompt], name: str) -> Score:
    """Score answers: a prompt without an expected answer needs one that ends with `stop`."""
    score = Score(name)
    for prompt, reply in zip(prompts, send_prompts(client, model, prompts), strict=True):
        ended = reply.finish_reason == "stop" and bool(reply.text.strip())
        correct = ended and prompt.answer in (None, reply.text.strip())
        score.add(reply, correct=correct, expected=prompt.answer or f"({prompt.kind} with an end)")
    return score


def score_pictures(
    client: httpx.Client, model: str, pictures: Sequence[Picture], name: str = "pictures"
) -> Score:
    """Score answers that name the colour and the shape, and no other of either."""
    score = Score(name)
    prompts = [held_out.picture_prompt(picture, n) for n, picture in enumerate(pictures)]
    for picture, reply in zip(pictures, send_prompts(client, model, prompts), strict=True):
        words = set(reply.text.lower().replace(".", " ").split())
        named = words & {*PICTURE_COLOURS, *PICTURE_SHAPES}
        correct = named == {picture.colour, picture.shape}
        score.add(reply, correct=correct, expected=f"{picture.colour} {picture.shape}")
    return score


def score_all(
    client: httpx.Client, model: str, *, size: int = 200, seed: int = 1, progress: bool = False
) -> list[Score]:
    """Score questions, counts, long answers, facts in long system prompts, and pictures.

    `size` is the number of questions and pictures. Another `seed` draws other prompts of the same
    kinds, except for the counts and the long answers.
    """
    parts: list[Callable[[], Score]] = [
        lambda: score_answers(
            client, model, held_out.prompts(size, seed=seed), "held-out questions"
        ),
        lambda: score_answers(client, model, held_out.small_prompts(), "counts and sums"),
        lambda: score_answers(client, model, held_out.long_prompts(), "long answers"),
        *(
            lambda tokens=tokens: score_answers(
                client,
                model,
                held_out.fact_prompts(size // 10, tokens, seed=seed),
                f"facts in {tokens} tokens",
            )
            for tokens in held_out.PROMPT_LENGTHS
        ),
        lambda: score_pictures(client, model, held_out.pictures(size, seed=seed)),
    ]
    return [part() for part in (track(parts, "Scoring") if progress else parts)]


def as_table(scores: Sequence[Score]) -> Table:
    """Return the scores as a table."""
    table = Table(title="Demo checkpoint")
    for heading in ("part", "prompts", "correct", "tokens", "drafted", "accepted"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for score in scores:
        rate = score.drafts.rate
        table.add_row(
            score.name, str(score.prompts), f"{score.share:.1%}", str(score.tokens),
            str(score.drafts.drafted or "-"), "-" if rate is None else f"{rate:.1%}",
        )  # fmt: skip
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Score an endpoint, print a table, and write JSON on request."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.score", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:9200")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--size", type=int, default=200, help="number of questions and pictures")
    parser.add_argument("--seed", type=int, default=1, help="seed of the held-out set")
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    options = parser.parse_args(arguments)
    console = Console()
    with httpx.Client(base_url=options.url, timeout=300) as client:
        scores = score_all(
            client, options.model, size=options.size, seed=options.seed, progress=True
        )
    console.print(as_table(scores))
    for score in scores:
        for expected, actual in score.mistakes[:3]:
            console.print(
                f"[dim]{score.name}:[/] expected {expected[:80]!r}, got {actual[:160]!r}",
                highlight=False,
            )
    if options.json:
        records = [asdict(score) | {"acceptance": score.drafts.rate} for score in scores]
        options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
