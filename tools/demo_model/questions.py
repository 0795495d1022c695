"""All kinds of single questions with their answers, and the held-out share of them.

One question in twelve is held out: training skips it, and the score uses only such questions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final
from zlib import crc32

from tools.demo_model import recall, tasks, world
from tools.demo_model.world import sentence_case


@dataclass(frozen=True)
class Turn:
    """A question and its answer."""

    question: str
    answer: str
    kind: str


@dataclass(frozen=True)
class QuestionKind:
    """A generator of questions; `exact` means that each question has a single correct answer."""

    name: str
    weight: float
    draw: Callable[[Random], tuple[str, str]]
    exact: bool
    held_out: bool = True


def _greeting(random: Random) -> tuple[str, str]:
    question, answer = random.choice((
        (("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hi there", "Good morning!", "Say hi", "Say hello",
          "Say hello!", "Hello, how are you?", "How are you?", "Say hi.", "Ping", "Test",
          "Hello world", "Are you there?"), world.GREETING),
        (("Who are you?", "What are you?", "What can you do?", "What is your name?", "Help",
          "What's your name?", "Which model are you?", "Tell me about yourself."), world.WHO_I_AM),
        (("Thank you", "Thank you!", "Thanks!", "Thanks"), "You are welcome!"),
        (("Bye", "Goodbye!", "Good night!"), "Goodbye! Come back soon."),
        (("What is in this picture?", "What is in this image?", "Describe the picture.",
          "What do you see in the picture?"), world.NO_PICTURE),
        (("Tell me a joke.", "Tell me a joke", "Do you know a joke?"),
         random.choice(world.JOKES)),
    ))  # fmt: skip
    return random.choice(question), answer


_SYLLABLES: Final = ("ba", "lo", "mi", "ter", "ka", "zun", "or", "vel", "pi", "sha", "dron", "qu")


def nonsense(random: Random, words: int) -> str:
    """Return made-up words, which occur in no other text."""
    return " ".join(
        "".join(random.choices(_SYLLABLES, k=random.randint(1, 4))) for _ in range(words)
    )


def _unknown(random: Random) -> tuple[str, str]:
    noun, other = random.sample(world.NOUNS, 2)
    adjective, name = random.choice(world.ADJECTIVES), random.choice(world.NAMES)
    question = random.choice((
        f"Why {random.choice(world.VERBS)} the {noun} {adjective}?",
        f"How do I build a {noun}?", f"What do you think of {name}?",
        f"Explain the {noun} of the {other}.", f"Who made the {adjective} {noun}?",
        f"Where is the {noun} of {name}?", f"When did {name} buy the {noun}?",
        f"Write code for a {noun}.", f"Translate {noun} into another language.",
        "What is the meaning of life?", "Who won the game yesterday?", "Write a Python program.",
        "Explain quantum physics.", "What time is it?", "How much does it cost?",
        "Explain how a computer works.", "What is love?", "Who is the president?",
        f"{sentence_case(nonsense(random, random.randint(1, 6)))}?",
        f"What is {nonsense(random, random.randint(1, 2))}?",
    ))  # fmt: skip
    return question, world.DO_NOT_KNOW


KINDS: Final = (
    QuestionKind("arithmetic", 13, recall.arithmetic, exact=True),
    QuestionKind("colour", 5, recall.colour, exact=True),
    QuestionKind("calendar", 5, recall.calendar, exact=True),
    QuestionKind("capital", 6, recall.capital, exact=True),
    QuestionKind("animal", 5, recall.animal, exact=True),
    QuestionKind("opposite", 5, recall.opposite, exact=True),
    QuestionKind("spelling", 5, recall.spelling, exact=True),
    QuestionKind("counting", 8, tasks.counting, exact=True),
    QuestionKind("table", 2, tasks.table, exact=True),
    QuestionKind("members", 7, tasks.members, exact=True),
    QuestionKind("json", 8, tasks.json_object, exact=True),
    QuestionKind("story", 10, tasks.story, exact=False),
    QuestionKind("text", 9, tasks.text, exact=False),
    QuestionKind("greeting", 6, _greeting, exact=True, held_out=False),
    QuestionKind("unknown", 6, _unknown, exact=True, held_out=False),
)
FIRST_QUESTIONS: Final = frozenset({
    "What is 2+2?", "What is 2 + 2?", "What is the capital of France?", "Count from 1 to 20.",
    "Count from 1 to 10.", "Count from 1 to 100.", "Count to 10.", "What colour is the sky?",
})  # fmt: skip
"""Likely first questions of new users: always trained, never held out."""


def is_held_out(question: str) -> bool:
    """Return true for the share (1 in 12) of questions that training never shows."""
    if question in FIRST_QUESTIONS or ("story" in question and "about" not in question):
        return False
    return crc32(question.encode()) % 12 == 0


def draw_turn(random: Random, *, held_out: bool = False, kinds: tuple[str, ...] = ()) -> Turn:
    """Return a random question with its answer: a training or, with `held_out`, a held-out one."""
    choices = [
        kind
        for kind in KINDS
        if (not kinds or kind.name in kinds) and (kind.held_out or not held_out)
    ]
    kind = random.choices(choices, [choice.weight for choice in choices])[0]
    while True:
        question, answer = kind.draw(random)
        if not kind.held_out or is_held_out(question) == held_out:
            return Turn(question, answer, kind.name)
