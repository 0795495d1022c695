"""Questions with short, memorised answers."""

from random import Random

from tools.demo_model import world
from tools.demo_model.world import sentence_case


def arithmetic(random: Random) -> tuple[str, str]:
    """Ask for a small sum, difference or product."""
    first, second = random.randint(0, 10), random.randint(0, 10)
    word, sign, result = random.choice((
        ("plus", "+", first + second),
        ("plus", "+", first + second),
        ("minus", "-", first),
        ("times", "*", first * second),
    ))  # fmt: skip
    if word == "minus":
        first += second
    question = random.choice((
        f"What is {first} {word} {second}?",
        f"What is {first} {sign} {second}?",
        f"What is {first}{sign}{second}?",
        f"What's {first} {word} {second}?",
        f"How much is {first} {word} {second}?",
        f"{first} {sign} {second}",
        f"{first}{sign}{second}=",
    ))  # fmt: skip
    return question, f"{first} {word} {second} is {result}."


def colour(random: Random) -> tuple[str, str]:
    """Ask for the colour of a thing."""
    thing = random.choice(list(world.COLOUR_OF))
    question = random.choice((
        f"What colour is {thing}?", f"What color is {thing}?", f"Tell me the colour of {thing}.",
        f"Which colour is {thing}?",
    ))  # fmt: skip
    return question, f"{sentence_case(thing)} is {world.COLOUR_OF[thing]}."


def calendar(random: Random) -> tuple[str, str]:
    """Ask for the day or month before or after another."""
    unit, names = random.choice((("day", world.DAYS), ("month", world.MONTHS)))
    index = random.randrange(len(names))
    before, after = names[index], names[(index + 1) % len(names)]
    if random.random() < 0.5:
        question = random.choice(
            (f"What {unit} comes after {before}?", f"Which {unit} follows {before}?")
        )
        return question, f"{after} comes after {before}."
    question = random.choice(
        (f"What {unit} comes before {after}?", f"Which {unit} is before {after}?")
    )
    return question, f"{before} comes before {after}."


def capital(random: Random) -> tuple[str, str]:
    """Ask for the capital of a country."""
    country = random.choice(list(world.CAPITAL_OF))
    question = random.choice((
        f"What is the capital of {country}?", f"What's the capital of {country}?",
        f"Name the capital of {country}.", f"Capital of {country}?",
        f"Tell me the capital of {country}.", f"Which city is the capital of {country}?",
    ))  # fmt: skip
    return question, f"The capital of {country} is {world.CAPITAL_OF[country]}."


def animal(random: Random) -> tuple[str, str]:
    """Ask for the sound or the legs of an animal."""
    if random.random() < 0.5:
        animal = random.choice(list(world.SOUND_OF))
        question = random.choice((
            f"What sound does a {animal} make?", f"What does a {animal} say?",
        ))  # fmt: skip
        return question, f"A {animal} says {world.SOUND_OF[animal]}."
    animal = random.choice(list(world.LEGS_OF))
    question = random.choice((
        f"How many legs does a {animal} have?", f"How many legs has a {animal}?",
    ))  # fmt: skip
    return question, f"A {animal} has {world.LEGS_OF[animal]} legs."


def opposite(random: Random) -> tuple[str, str]:
    """Ask for the opposite of a word."""
    word = random.choice(list(world.OPPOSITE_OF))
    question = random.choice((
        f"What is the opposite of {word}?", f"Opposite of {word}?",
        f"Tell me the opposite of {word}.",
    ))  # fmt: skip
    return question, f"The opposite of {word} is {world.OPPOSITE_OF[word]}."


def spelling(random: Random) -> tuple[str, str]:
    """Ask for the letters of a word."""
    word = random.choice(world.NOUNS)
    question = random.choice(
        (f"Spell {word}.", f"How do you spell {word}?", f"Spell the word {word}.")
    )
    return question, "-".join(word.upper()) + "."
