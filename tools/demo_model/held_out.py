"""Prompts of the score and of the tests: held-out prompts and pictures, and counts.

All prompts are drawn with fixed seeds, without MLX, and are the same on every machine.
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
    """Messages for `/v1/chat/completions`, and the expected answer if there is only one."""

    messages: tuple[dict[str, Any], ...]
    kind: str
    answer: str | None = None


def _messages(question: str, system: str = "") -> tuple[dict[str, Any], ...]:
    user = {"role": "user", "content": question}
    return ({"role": "system", "content": system}, user) if system else (user,)


def prompts(count: int, *, seed: int = 1, kinds: Sequence[str] = ()) -> list[Prompt]:
    """Return `count` held-out questions, of all kinds by default, half with a system prompt."""
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
    """Return `count` questions about facts in system prompts of about `tokens` tokens."""
    random = Random(f"held out facts {seed} {tokens}")
    drawn = []
    for _ in range(count):
        facts = draw_facts(random, 4)
        fact = random.choice(facts)
        system = system_prompt(random, (tokens - 60) // _TOKENS_IN_FILLER, facts, strange=False)
        question = random.choice(fact.questions)
        drawn.append(Prompt(_messages(question, system), f"fact at {tokens}", fact.answer))
    return drawn


def small_prompts() -> list[Prompt]:
    """Return counts to forty, and sums and differences up to ten, in one wording each.

    Training includes most of them. New users try them first, and the held-out questions contain so
    few of each kind that a model which counts to 92 instead of 12 could score as well.
    """
    drawn = [
        Prompt(_messages(f"Count from 1 to {last}."), "count", f"{_numbers_to(last)}.")
        for last in range(3, 41)
    ]
    for first in range(11):
        for second in range(11):
            for left, word, result in (
                (first, "plus", first + second),
                (first + second, "minus", first),
            ):
                term = f"{left} {word} {second}"
                drawn.append(Prompt(_messages(f"What is {term}?"), word, f"{term} is {result}."))
    return drawn


def _numbers_to(last: int) -> str:
    return ", ".join(str(number) for number in range(1, last + 1))


def long_prompts() -> list[Prompt]:
    """Return questions with answers of 200 to 600 tokens."""
    return [Prompt(_messages(question), "long") for question in LONG_QUESTIONS]


def pictures(count: int = 200, *, seed: int = 1) -> list[Picture]:
    """Return `count` pictures with held-out sizes, positions and backgrounds."""
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
