"""Tasks with longer answers: counting, tables, lists, JSON, stories and other texts."""

import json
from random import Random

from tools.demo_model import stories, world
from tools.demo_model.world import NUMBER_WORDS


def counting(random: Random) -> tuple[str, str]:
    """Ask to count: up, down or in steps; up to 160 numbers."""
    shape = random.random()
    if shape < 0.12:
        last = random.randint(5, 30)
        numbers = range(last, 0, -1)
        question = random.choice((f"Count down from {last} to 1.", f"Count backwards from {last}."))
    elif shape < 0.22:
        step = random.choice((2, 5, 10))
        last = step * random.randint(4, 20)
        numbers = range(step, last + 1, step)
        question = random.choice((f"Count by {step} up to {last}.", f"Count to {last} by {step}."))
    else:
        first = 1 if random.random() < 0.7 else random.randint(0, 50)
        last = first + random.choice((4, 9, 14, 19, 29, 49, 99, 119, random.randint(2, 160)))
        numbers = range(first, last + 1)
        wordings = [
            f"Count from {first} to {last}.", f"Count from {first} to {last}",
            f"Please count from {first} to {last}.", f"Count {first} to {last}.",
            f"Can you count from {first} to {last}?",
        ]  # fmt: skip
        if first == 1:
            wordings += [f"Count to {last}.", f"Can you count to {last}?"]
        question = random.choice(wordings)
    return question, ", ".join(map(str, numbers)) + "."


def table(random: Random) -> tuple[str, str]:
    """Ask for a multiplication table."""
    factor, last = random.randint(2, 10), random.choice((5, 10, 10))
    question = random.choice((
        f"Write the table of {factor} up to {last}.",
        f"Write the multiplication table of {factor} up to {last}.",
    ))  # fmt: skip
    lines = (f"{factor} times {other} is {factor * other}." for other in range(1, last + 1))
    return question, "\n".join(lines)


def members(random: Random) -> tuple[str, str]:
    """Ask for some members of a group, as a list or as JSON."""
    group = random.choice(list(world.MEMBERS_OF))
    all_members = world.MEMBERS_OF[group]
    count = random.randint(2, len(all_members))
    members = all_members[:count]
    number = random.choice((NUMBER_WORDS[count], str(count)))
    if random.random() < 0.35:
        question = random.choice((
            f"Give me a JSON list of {number} {group}.", f"List {number} {group} as JSON.",
            f"Give me JSON with {number} {group}.",
        ))  # fmt: skip
        return question, json.dumps(members)
    question = random.choice((
        f"List {number} {group}.", f"Name {number} {group}.",
        f"Give me a list of {number} {group}.",
        f"Can you list {number} {group}?",
    ))  # fmt: skip
    return question, "\n".join(
        f"{number_}. {name}" for number_, name in enumerate(members, start=1)
    )


def json_object(random: Random) -> tuple[str, str]:
    """Ask for a small JSON object."""
    name, age = random.choice(world.NAMES), random.randint(1, 99)
    colour = random.choice(world.MEMBERS_OF["colours"])
    country = random.choice(list(world.CAPITAL_OF))
    first, second = random.randint(0, 10), random.randint(0, 10)
    question, value = random.choice((
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
    return question, json.dumps(value)


def story(random: Random) -> tuple[str, str]:
    """Ask for a story: short, plain or long."""
    length = random.choice(("short", "plain", "plain", "long"))
    hero = random.choice(list(stories.HEROES))
    size = {"short": "short ", "plain": "", "long": "long "}[length]
    about = f" about {world.with_article(hero)}" if random.random() < 0.75 else ""
    question = random.choice((
        f"Tell me a {size}story{about}.", f"Write a {size}story{about}.",
        f"Please tell me a {size}story{about}.", f"Can you tell me a {size}story{about}?",
        f"Write me a {size}story{about}.",
    ))  # fmt: skip
    return question, stories.story(random, hero, length)


def text(random: Random) -> tuple[str, str]:
    """Ask for a description, diary, letter, poem or recipe."""
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
