"""Single questions with their answers: facts, sums, counting, lists, JSON and long texts.

A share of the questions is held out: the trainer never shows them, the score asks nothing else.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final
from zlib import crc32

from workers.demo import stories, world
from workers.demo.world import NUMBER_WORDS, sentence_case


@dataclass(frozen=True)
class Turn:
    """One question and the answer that the model should give."""

    question: str
    answer: str
    kind: str


@dataclass(frozen=True)
class QuestionKind:
    """A way to draw questions; `exact` when each question has one right answer."""

    name: str
    weight: float
    draw: Callable[[Random], tuple[str, str]]
    exact: bool
    held_out: bool = True


def _arithmetic(random: Random) -> tuple[str, str]:
    first, second = random.randint(0, 10), random.randint(0, 10)
    word, sign, result = random.choice((
        ("plus", "+", first + second),
        ("plus", "+", first + second),
        ("minus", "-", first),
        ("times", "*", first * second),
    ))  # fmt: skip
    if word == "minus":
        first += second
    asked = random.choice((
        f"What is {first} {word} {second}?",
        f"What is {first} {sign} {second}?",
        f"What is {first}{sign}{second}?",
        f"What's {first} {word} {second}?",
        f"How much is {first} {word} {second}?",
        f"{first} {sign} {second}",
        f"{first}{sign}{second}=",
    ))  # fmt: skip
    return asked, f"{first} {word} {second} is {result}."


def _colour(random: Random) -> tuple[str, str]:
    thing = random.choice(list(world.COLOUR_OF))
    asked = random.choice((
        f"What colour is {thing}?", f"What color is {thing}?", f"Tell me the colour of {thing}.",
        f"Which colour is {thing}?",
    ))  # fmt: skip
    return asked, f"{sentence_case(thing)} is {world.COLOUR_OF[thing]}."


def _neighbour(random: Random) -> tuple[str, str]:
    unit, names = random.choice((("day", world.DAYS), ("month", world.MONTHS)))
    index = random.randrange(len(names))
    here, after = names[index], names[(index + 1) % len(names)]
    if random.random() < 0.5:
        asked = random.choice((f"What {unit} comes after {here}?", f"Which {unit} follows {here}?"))
        return asked, f"{after} comes after {here}."
    asked = random.choice(
        (f"What {unit} comes before {after}?", f"Which {unit} is before {after}?")
    )
    return asked, f"{here} comes before {after}."


def _capital(random: Random) -> tuple[str, str]:
    country = random.choice(list(world.CAPITAL_OF))
    asked = random.choice((
        f"What is the capital of {country}?", f"What's the capital of {country}?",
        f"Name the capital of {country}.", f"Capital of {country}?",
        f"Tell me the capital of {country}.", f"Which city is the capital of {country}?",
    ))  # fmt: skip
    return asked, f"The capital of {country} is {world.CAPITAL_OF[country]}."


def _animal(random: Random) -> tuple[str, str]:
    if random.random() < 0.5:
        animal = random.choice(list(world.SOUND_OF))
        asked = random.choice((
            f"What sound does a {animal} make?", f"What does a {animal} say?",
        ))  # fmt: skip
        return asked, f"A {animal} says {world.SOUND_OF[animal]}."
    animal = random.choice(list(world.LEGS_OF))
    asked = random.choice((
        f"How many legs does a {animal} have?", f"How many legs has a {animal}?",
    ))  # fmt: skip
    return asked, f"A {animal} has {world.LEGS_OF[animal]} legs."


def _opposite(random: Random) -> tuple[str, str]:
    word = random.choice(list(world.OPPOSITE_OF))
    asked = random.choice((
        f"What is the opposite of {word}?", f"Opposite of {word}?",
        f"Tell me the opposite of {word}.",
    ))  # fmt: skip
    return asked, f"The opposite of {word} is {world.OPPOSITE_OF[word]}."


def _spelling(random: Random) -> tuple[str, str]:
    word = random.choice(world.NOUNS)
    asked = random.choice(
        (f"Spell {word}.", f"How do you spell {word}?", f"Spell the word {word}.")
    )
    return asked, "-".join(word.upper()) + "."


def _counting(random: Random) -> tuple[str, str]:
    shape = random.random()
    if shape < 0.12:
        last = random.randint(5, 30)
        numbers = range(last, 0, -1)
        asked = random.choice((f"Count down from {last} to 1.", f"Count backwards from {last}."))
    elif shape < 0.22:
        step = random.choice((2, 5, 10))
        last = step * random.randint(4, 20)
        numbers = range(step, last + 1, step)
        asked = random.choice((f"Count by {step} up to {last}.", f"Count to {last} by {step}."))
    else:
        first = 1 if random.random() < 0.7 else random.randint(0, 50)
        last = first + random.choice((4, 9, 14, 19, 29, 49, 99, 119, random.randint(2, 160)))
        numbers = range(first, last + 1)
        asked = random.choice((
            f"Count from {first} to {last}.", f"Count from {first} to {last}",
            f"Please count from {first} to {last}.", f"Count {first} to {last}.",
            f"Can you count from {first} to {last}?",
        ))  # fmt: skip
    return asked, ", ".join(map(str, numbers)) + "."


def _table(random: Random) -> tuple[str, str]:
    factor, last = random.randint(2, 10), random.choice((5, 10, 10))
    asked = random.choice((
        f"Write the table of {factor} up to {last}.",
        f"Write the multiplication table of {factor} up to {last}.",
    ))  # fmt: skip
    lines = (f"{factor} times {other} is {factor * other}." for other in range(1, last + 1))
    return asked, "\n".join(lines)


def _members(random: Random) -> tuple[str, str]:
    group = random.choice(list(world.MEMBERS_OF))
    known = world.MEMBERS_OF[group]
    count = random.randint(2, len(known))
    members = known[:count]
    number = random.choice((NUMBER_WORDS[count], str(count)))
    if random.random() < 0.35:
        asked = random.choice((
            f"Give me a JSON list of {number} {group}.", f"List {number} {group} as JSON.",
            f"Give me JSON with {number} {group}.",
        ))  # fmt: skip
        return asked, json.dumps(members)
    asked = random.choice((
        f"List {number} {group}.", f"Name {number} {group}.",
        f"Give me a list of {number} {group}.",
        f"Can you list {number} {group}?",
    ))  # fmt: skip
    return asked, "\n".join(f"{place}. {name}" for place, name in enumerate(members, start=1))


def _json_object(random: Random) -> tuple[str, str]:
    name, age = random.choice(world.NAMES), random.randint(1, 99)
    colour = random.choice(world.MEMBERS_OF["colours"])
    country = random.choice(list(world.CAPITAL_OF))
    first, second = random.randint(0, 10), random.randint(0, 10)
    asked, value = random.choice((
        (f"Give me JSON for {name}, age {age}, who likes {colour}.",
         {"name": name, "age": age, "colour": colour}),
        (f"Make a JSON object: name {name}, age {age}, colour {colour}.",
         {"name": name, "age": age, "colour": colour}),
        (f"Give me JSON with the name {name} and the age {age}.", {"name": name, "age": age}),
        (f"Write a JSON object with name {name} and age {age}.", {"name": name, "age": age}),
        (f"Give me JSON with the capital of {country}.",
         {"country": country, "capital": world.CAPITAL_OF[country]}),
        (f"What is the capital of {country}? Answer in JSON.",
         {"country": country, "capital": world.CAPITAL_OF[country]}),
        (f"What is {first} plus {second}? Answer in JSON.", {"answer": first + second}),
    ))  # fmt: skip
    return asked, json.dumps(value)


def _story(random: Random) -> tuple[str, str]:
    length = random.choice(("short", "plain", "plain", "long"))
    hero = random.choice(list(stories.HEROES))
    size = {"short": "short ", "plain": "", "long": "long "}[length]
    about = f" about {world.with_article(hero)}" if random.random() < 0.75 else ""
    asked = random.choice((
        f"Tell me a {size}story{about}.", f"Write a {size}story{about}.",
        f"Please tell me a {size}story{about}.", f"Can you tell me a {size}story{about}?",
        f"Write me a {size}story{about}.",
    ))  # fmt: skip
    return asked, stories.story(random, hero, length)


def _text(random: Random) -> tuple[str, str]:
    topic = random.choice(list(stories.TOPICS))
    name, dish = random.choice(world.NAMES), random.choice(list(stories.DISHES))
    start, count = random.randrange(7), random.randint(3, 7)
    days = (world.DAYS * 2)[start : start + count]
    return random.choice((
        lambda: (random.choice((f"Tell me about {topic}.", f"Describe {topic}.",
                                f"What do you know about {topic}?")),
                 stories.description(random, topic, long=False)),
        lambda: (random.choice((f"Write a long text about {topic}.",
                                f"Tell me everything about {topic}.",
                                f"Describe {topic} in detail.")),
                 stories.description(random, topic, long=True)),
        lambda: (random.choice(("Write a diary for a week.", "Write a diary for one week.")),
                 stories.diary(random, world.DAYS)),
        lambda: (random.choice(("Write a diary for two weeks.", "Write a long diary.")),
                 stories.diary(random, world.DAYS * 2)),
        lambda: (f"Write a diary from {days[0]} to {days[-1]}.", stories.diary(random, days)),
        lambda: (random.choice((f"Write a letter to {name}.", f"Write {name} a letter.")),
                 stories.letter(random, name)),
        lambda: (random.choice((f"Write a poem about {topic}.",
                                f"Write a short poem about {topic}.")),
                 stories.poem(random, topic)),
        lambda: (random.choice((f"How do I make {dish}?", f"Give me a recipe for {dish}.",
                                f"Write a recipe for {dish}.")),
                 stories.recipe(random, dish)),
    ))()  # fmt: skip


def _greeting(random: Random) -> tuple[str, str]:
    asked, answer = random.choice((
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
    return random.choice(asked), answer


_SYLLABLES: Final = ("ba", "lo", "mi", "ter", "ka", "zun", "or", "vel", "pi", "sha", "dron", "qu")


def nonsense(random: Random, words: int) -> str:
    """`words` made-up words: text from outside of the world."""
    return " ".join(
        "".join(random.choices(_SYLLABLES, k=random.randint(1, 4))) for _ in range(words)
    )


def _unknown(random: Random) -> tuple[str, str]:
    noun, other = random.sample(world.NOUNS, 2)
    adjective, name = random.choice(world.ADJECTIVES), random.choice(world.NAMES)
    asked = random.choice((
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
    return asked, world.DO_NOT_KNOW


KINDS: Final = (
    QuestionKind("arithmetic", 13, _arithmetic, exact=True),
    QuestionKind("colour", 5, _colour, exact=True),
    QuestionKind("neighbour", 5, _neighbour, exact=True),
    QuestionKind("capital", 6, _capital, exact=True),
    QuestionKind("animal", 5, _animal, exact=True),
    QuestionKind("opposite", 5, _opposite, exact=True),
    QuestionKind("spelling", 5, _spelling, exact=True),
    QuestionKind("counting", 8, _counting, exact=True),
    QuestionKind("table", 2, _table, exact=True),
    QuestionKind("members", 7, _members, exact=True),
    QuestionKind("json", 8, _json_object, exact=True),
    QuestionKind("story", 10, _story, exact=False),
    QuestionKind("text", 9, _text, exact=False),
    QuestionKind("greeting", 6, _greeting, exact=True, held_out=False),
    QuestionKind("unknown", 6, _unknown, exact=True, held_out=False),
)
FIRST_QUESTIONS: Final = frozenset({
    "What is 2+2?", "What is 2 + 2?", "What is the capital of France?", "Count from 1 to 20.",
    "Count from 1 to 10.", "Count from 1 to 100.", "What colour is the sky?",
})  # fmt: skip
"""What a stranger types first: always trained, never held out."""


def is_held_out(question: str) -> bool:
    """Return true for the share (1 in 12) of questions that training never shows."""
    if question in FIRST_QUESTIONS or ("story" in question and "about" not in question):
        return False
    return crc32(question.encode()) % 12 == 0


def draw_turn(random: Random, *, held_out: bool = False, kinds: tuple[str, ...] = ()) -> Turn:
    """One turn: of the training questions, or with `held_out` of the others."""
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
