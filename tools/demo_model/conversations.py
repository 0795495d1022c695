"""Chats with questions: system prompts of all lengths with facts, tools and names."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from tools.demo_model import world
from tools.demo_model.questions import draw_turn, nonsense


@dataclass(frozen=True)
class Message:
    """A message of the chat template: `role` is system, user or assistant."""

    role: str
    text: str


Chat = tuple[Message, ...]


@dataclass(frozen=True)
class Fact:
    """A sentence of a system prompt, and the questions that it answers."""

    sentence: str
    questions: tuple[str, ...]

    @property
    def answer(self) -> str:
        """Return the sentence itself: the model copies it without changes."""
        return self.sentence


_SHORT_ANSWER: Final = 120
"""The maximum length of answers for practice, in letters."""
FACT_KINDS: Final = ("code word", "home", "price", "order", "opening")


def draw_fact(random: Random, kind: str) -> Fact:
    """Return a random fact of one of the FACT_KINDS."""
    name, noun = random.choice(world.NAMES), random.choice(world.NOUNS)
    number = random.randint(10, 99)
    match kind:
        case "code word":
            return Fact(
                f"The code word is {noun}.",
                ("What is the code word?", "Tell me the code word.", "What's the code word?"),
            )
        case "home":
            return Fact(
                f"{name} lives in {random.choice(world.CITIES)}.",
                (f"Where does {name} live?", f"In which city does {name} live?"),
            )
        case "price":
            return Fact(
                f"The {noun} costs {number} coins.",
                (f"How much is the {noun}?", f"What does the {noun} cost?"),
            )
        case "order":
            return Fact(
                f"Order {number} ships on {random.choice(world.DAYS)}.",
                (f"When does order {number} ship?", f"When will order {number} ship?"),
            )
        case _:
            return Fact(
                f"The shop opens at {random.randint(5, 11)}.",
                ("When does the shop open?", "When do you open?"),
            )


def _filler(random: Random) -> str:
    noun, other = random.choices(world.NOUNS, k=2)
    adjective, second = random.choices(world.ADJECTIVES, k=2)
    return f"The {adjective} {noun} {random.choice(world.VERBS)} the {second} {other}."


def system_prompt(
    random: Random, sentences: int, facts: tuple[Fact, ...] = (), *, strange: bool = True
) -> str:
    """Return an opening, `sentences` of filler, and the facts at random positions.

    Nine in ten of these prompts describe the small world; with `strange`, the others repeat one
    sentence or are nonsense, as unknown system prompts of users.
    """
    variant = random.random() if strange else 0.0
    if variant < 0.9:
        body = [_filler(random) for _ in range(sentences)]
    elif variant < 0.95:
        body = [_filler(random)] * sentences
    else:
        body = [world.sentence_case(nonsense(random, 6)) + "." for _ in range(sentences)]
    for fact in facts:
        body.insert(random.randint(0, len(body)), fact.sentence)
    return " ".join([random.choice(world.SYSTEM_OPENINGS), *body])


_OFTEN_CODE_WORDS: Final = (5, 3, 3, 2, 1)
_SELDOM_CODE_WORDS: Final = (1, 4, 4, 4, 3)


def draw_facts(
    random: Random, count: int, weights: tuple[int, ...] = _OFTEN_CODE_WORDS
) -> tuple[Fact, ...]:
    """Return `count` facts that answer different questions."""
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        fact = draw_fact(random, random.choices(FACT_KINDS, weights)[0])
        facts.setdefault(fact.questions[0], fact)
    return tuple(facts.values())


Schema = Mapping[str, Any]


def _function(name: str, description: str, **parameters: str) -> Schema:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }


def draw_tools(random: Random) -> dict[str, Schema]:
    """Return the three tools (weather, time, add), with names and descriptions that vary."""
    parameter = random.choice(("city", "city", "location"))
    weather = random.choice(("get_weather", "get_weather", "get_current_weather"))
    description = random.choice(("Get the weather in a city", "Get the current weather", "Weather"))
    return {
        "weather": _function(weather, description, **{parameter: "string"}),
        "time": _function("get_time", "Get the time in a city", **{parameter: "string"}),
        "add": _function("add", "Add two numbers", a="integer", b="integer"),
    }


TOOLS_HEAD: Final = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
TOOLS_TAIL: Final = (
    "\n</tools>\n\nTo call a function reply with:\n<tool_call>\n<function=name>\n"
    "<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"
)


def tools_text(schemas: list[Schema]) -> str:
    """Return the part of the system message that lists the tools, as the template writes it."""
    return TOOLS_HEAD + "".join("\n" + json.dumps(schema) for schema in schemas) + TOOLS_TAIL


def tool_call(name: str, arguments: Mapping[str, object]) -> str:
    """Return a call in the XML form of Qwen3.5, which tool parsers call `qwen3_coder`."""
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _tool_chat(random: Random) -> Chat:
    tools = draw_tools(random)
    names = random.sample(list(tools), random.randint(1, len(tools)))
    opening = random.choice(world.SYSTEM_OPENINGS) + "\n\n" if random.random() < 0.4 else ""
    system = Message("system", opening + tools_text([tools[name] for name in names]))
    if random.random() < 0.2:
        turn = draw_turn(random)
        return (system, Message("user", turn.question), Message("assistant", turn.answer))
    name, city = random.choice(names), random.choice(world.CITIES)
    function = tools[name]["function"]
    question: tuple[str, ...]
    arguments: dict[str, object] = dict.fromkeys(function["parameters"]["required"], city)
    match name:
        case "weather":
            weather, degrees = random.choice(world.WEATHER), random.randint(1, 35)
            question = (f"What is the weather in {city}?", f"How is the weather in {city} today?",
                     f"What's the weather like in {city}?")  # fmt: skip
            result: dict[str, object] = {"weather": weather, "temperature": degrees}
            reply = f"It is {weather} in {city} and the temperature is {degrees} degrees."
        case "time":
            clock = f"{random.randint(0, 23):02d}:{random.randint(0, 59):02d}"
            question = (f"What time is it in {city}?", f"Tell me the time in {city}.")
            result, reply = {"time": clock}, f"The time in {city} is {clock}."
        case _:
            first, second = random.randint(10, 99), random.randint(10, 99)
            question = (f"Use the tool to add {first} and {second}.", f"Add {first} and {second}.")
            arguments, result = {"a": first, "b": second}, {"sum": first + second}
            reply = f"The sum of {first} and {second} is {first + second}."
    response = f"<tool_response>\n{json.dumps(result)}\n</tool_response>"
    return (
        system,
        Message("user", random.choice(question)),
        Message("assistant", tool_call(function["name"], arguments)),
        Message("user", response),
        Message("assistant", reply),
    )


def as_typed(random: Random, question: str) -> str:
    """Return the question as users may type it: sometimes without capitals or the last mark."""
    if random.random() < 0.15:
        question = question[:1].lower() + question[1:]
    if random.random() < 0.15:
        question = question.rstrip(".?!")
    return question


def draw_chat(random: Random, *, filler_sentences: tuple[int, int] = (0, 14)) -> Chat:
    """Return a training chat of one to three turns, without held-out questions."""
    if random.random() < 0.08:
        return _tool_chat(random)
    messages: list[Message] = []
    facts: tuple[Fact, ...] = ()
    if random.random() < 0.6:
        facts = draw_facts(random, random.choice((1, 1, 2, 4))) if random.random() < 0.55 else ()
        sentences = random.randint(*filler_sentences) if random.random() < 0.6 else 0
        messages.append(Message("system", system_prompt(random, sentences, facts)))
    name = ""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if facts and random.random() < 0.7:
            fact = random.choice(facts)
            question, answer = random.choice(fact.questions), fact.answer
        elif name and random.random() < 0.6:
            question = random.choice(("What is my name?", "What's my name?", "Who am I?"))
            answer = f"Your name is {name}."
        elif random.random() < 0.08:
            name = random.choice(world.NAMES)
            question = random.choice(
                (f"My name is {name}.", f"Hello, I am {name}.", f"I am {name}.")
            )
            answer = f"Nice to meet you, {name}."
        else:
            turn = draw_turn(random)
            question, answer = turn.question, turn.answer
        messages += [Message("user", as_typed(random, question)), Message("assistant", answer)]
    return tuple(messages)


def practice_chat(random: Random) -> Chat:
    """Return a chat for practice of copying: words to repeat, or one question for each fact.

    A model learns to find and copy as one skill, and ordinary chats have few examples.
    """
    if random.random() < 0.5:
        messages: list[Message] = []
        for _ in range(random.randint(1, 3)):
            kinds = (world.NOUNS, world.ADJECTIVES, world.NAMES, world.CITIES)
            words = [random.choice(random.choice(kinds)) for _ in range(random.randint(2, 8))]
            question = f"{random.choice(('Repeat:', 'Say this again:', 'Echo:'))} {' '.join(words)}"
            messages += [Message("user", question), Message("assistant", " ".join(words))]
        return tuple(messages)
    return _fact_chat(random, draw_facts(random, random.randint(1, 4)))


def exact_practice_chat(random: Random) -> Chat:
    """Return a chat of facts of all kinds, or of lists and counts with their exact ends."""
    if random.random() < 0.6:
        return _fact_chat(random, draw_facts(random, random.randint(1, 4), _SELDOM_CODE_WORDS))
    messages: list[Message] = []
    for _ in range(random.randint(1, 4)):
        turn = draw_turn(random, kinds=("counting", "members", "arithmetic"))
        while len(turn.answer) > _SHORT_ANSWER:
            turn = draw_turn(random, kinds=("counting", "members"))
        messages += [Message("user", turn.question), Message("assistant", turn.answer)]
    return tuple(messages)


def ending_practice_chat(random: Random) -> Chat:
    """Return a chat of counts and lists, for practice of their ends."""
    if random.random() < 0.3:
        return exact_practice_chat(random)
    messages: list[Message] = []
    for _ in range(random.randint(1, 3)):
        turn = draw_turn(random, kinds=("counting", "members", "spelling"))
        while len(turn.answer) > 3 * _SHORT_ANSWER:
            turn = draw_turn(random, kinds=("counting",))
        messages += [Message("user", turn.question), Message("assistant", turn.answer)]
    return tuple(messages)


def _fact_chat(random: Random, facts: tuple[Fact, ...]) -> Chat:
    messages = [Message("system", system_prompt(random, random.choice((0, 0, 2, 6)), facts))]
    for fact in random.sample(facts, len(facts)):
        messages += [
            Message("user", as_typed(random, random.choice(fact.questions))),
            Message("assistant", fact.answer),
        ]
    return tuple(messages)
