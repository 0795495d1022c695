"""Prompts of the score and of the tests: held-out prompts and pictures, and counts.

Everything here is drawn from seeds of its own, needs no MLX, and is the same on every machine.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from random import Random
from typing import Any, Final

from PIL import Image

from tools.demo_model.conversations import draw_facts, system_prompt
from tools.demo_model.pictures import DESCRIBE, HELD_OUT_SIZES, Picture, draw_picture
from tools.demo_model.questions import KINDS, draw_turn
from tools.demo_model.world import SYSTEM_OPENINGS

_TOKENS_IN_FILLER: Final = 8
PROMPT_LENGTHS: Final = (512, 1024, 2048, 4096)
LONG_QUESTIONS: Final = (
    "Count from 1 to 120.",
    "Count from 7 to 106.",
    "Tell me a long story about a dragon.",
    "Write a long story about a fox.",
    "Please tell me a long story about a robot.",
    "Tell me a long story.",
    "Write a diary for two weeks.",
    "Can you tell me a long story about an owl?",
)


@dataclass(frozen=True)
class Prompt:
    """Messages for `/v1/chat/completions`, and the one right answer where there is one."""

    messages: tuple[dict[str, Any], ...]
    kind: str
    answer: str | None = None


def _messages(question: str, system: str = "") -> tuple[dict[str, Any], ...]:
    user = {"role": "user", "content": question}
    return ({"role": "system", "content": system}, user) if system else (user,)


def prompts(count: int, *, seed: int = 1, kinds: Sequence[str] = ()) -> list[Prompt]:
    """`count` held-out questions of the given kinds (all by default), half with a system prompt."""
    random = Random(f"held out {seed}")
    exact = {kind.name for kind in KINDS if kind.exact}
    drawn = []
    for _ in range(count):
        turn = draw_turn(random, held_out=True, kinds=tuple(kinds))
        system = random.choice(SYSTEM_OPENINGS) if random.random() < 0.5 else ""
        answer = turn.answer if turn.kind in exact else None
        drawn.append(Prompt(_messages(turn.question, system), turn.kind, answer))
    return drawn


def fact_prompts(count: int, tokens: int, *, seed: int = 1) -> list[Prompt]:
    """`count` questions about one of four facts in a system prompt of about `tokens` tokens."""
    random = Random(f"held out facts {seed} {tokens}")
    drawn = []
    for _ in range(count):
        facts = draw_facts(random, 4)
        asked = random.choice(facts)
        system = system_prompt(random, (tokens - 60) // _TOKENS_IN_FILLER, facts, strange=False)
        question = random.choice(asked.questions)
        drawn.append(Prompt(_messages(question, system), f"fact at {tokens}", asked.answer))
    return drawn


def small_prompts() -> list[Prompt]:
    """All counts to forty, and all sums and differences of numbers to ten, in one wording each.

    Training has shown most of them. They are what people try first, and of each kind the held-out
    questions hold so few that a model which counts to 92 for 12 can score as well as one that does
    not.
    """
    drawn = [
        Prompt(_messages(f"Count from 1 to {last}."), "count", f"{_counted(last)}.")
        for last in range(3, 41)
    ]
    for first in range(11):
        for second in range(11):
            for left, word, result in (
                (first, "plus", first + second),
                (first + second, "minus", first),
            ):
                said = f"{left} {word} {second}"
                drawn.append(Prompt(_messages(f"What is {said}?"), word, f"{said} is {result}."))
    return drawn


def _counted(last: int) -> str:
    return ", ".join(str(number) for number in range(1, last + 1))


def long_prompts() -> list[Prompt]:
    """Questions whose answers take 200 to 600 tokens and end by themselves."""
    return [Prompt(_messages(question), "long") for question in LONG_QUESTIONS]


def pictures(count: int = 200, *, seed: int = 1) -> list[Picture]:
    """`count` pictures with held-out sizes, positions and backgrounds."""
    random = Random(f"held out pictures {seed}")
    return [
        draw_picture(random, random.choice(HELD_OUT_SIZES), held_out=True, plain_share=0.0)
        for _ in range(count)
    ]


def data_url(image: Image.Image) -> str:
    """Return the picture as a `data:` URL of a PNG."""
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def picture_prompt(picture: Picture, number: int = 0) -> Prompt:
    """Return a request to describe the picture, in one of several wordings."""
    content = [
        {"type": "image_url", "image_url": {"url": data_url(picture.image)}},
        {"type": "text", "text": DESCRIBE[number % len(DESCRIBE)]},
    ]
    return Prompt(({"role": "user", "content": content},), "picture")
