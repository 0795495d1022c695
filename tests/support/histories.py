"""Random histories that OpenAI's API allows, in which each text, call and result is known."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from workers.engine.text.tokenizer import PromptRenderer
from workers.server.request import read_messages

NAMES = ("Bravo", "Quebec")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Works",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
        },
    }
    for name in NAMES
]


class History(NamedTuple):
    """Messages, and what must stand in a prompt of them."""

    messages: list[dict[str, Any]]
    turns: list[list[str]]
    """Words of each turn; a call and its results, and what stands beside them, are one."""
    pairs: list[tuple[str, str]]
    """Words of which the first stands before the second, within one turn."""


class _Writer:
    def __init__(self, random: Random) -> None:
        self.random = random
        self.count = 0
        self.messages: list[dict[str, Any]] = []
        self.turns: list[list[str]] = []
        self.pairs: list[tuple[str, str]] = []

    def word(self) -> str:
        self.count += 1
        return f"word{self.count:04d}"

    def text(self, word: str) -> Any:
        """Return a content: a string, or parts."""
        if self.random.random() < 0.8:
            return f"Say {word} please."
        return [{"type": "text", "text": f"Say {word}"}, {"type": "text", "text": " please."}]

    def say(self, role: str) -> None:
        word = self.word()
        self.messages.append({"role": role, "content": self.text(word)})
        self.turns.append([word])

    def answer(self) -> None:
        message: dict[str, Any] = {"role": "assistant"}
        if self.random.random() < 0.3:
            message["reasoning_content"] = "Perhaps."
        if self.random.random() < 0.15:
            message["content"] = self.random.choice([None, ""])
        else:
            word = self.word()
            message["content"] = self.text(word)
            self.turns.append([word])
        self.messages.append(message)

    def call(self) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": self.random.choice([None, ""])}
        if self.random.random() < 0.3:
            message["reasoning_content"] = "Perhaps."
        turn = []
        if self.random.random() < 0.4:
            turn.append(self.word())
            message["content"] = f"Say {turn[0]} please."
        calls, results = [], []
        for _ in range(self.random.choice([1, 1, 1, 2, 3])):
            called, returned, name = self.word(), self.word(), self.random.choice(NAMES)
            number = f"call_{self.count}"
            function = {"name": name, "arguments": json.dumps({"key": called})}
            calls.append({"id": number, "type": "function", "function": function})
            result: dict[str, Any] = {"role": "tool", "tool_call_id": number}
            if self.random.random() < 0.5:
                result["name"] = name
            results.append(result | {"content": self.text(returned)})
            self.pairs += [(word, called) for word in turn[:1] if message["content"]]
            self.pairs.append((called, returned))
            turn += [called, returned]
        if self.random.random() < 0.2:
            self.random.shuffle(results)
        self.messages += [message | {"tool_calls": calls}, *results]
        self.turns.append(turn)


def random_history(random: Random) -> History:
    """Return a history; its last message is the user's, a system message or a result."""
    writer = _Writer(random)
    for _ in range(random.choice([0, 0, 1, 1, 2])):
        writer.say(random.choice(["system", "developer"]))
    steps = random.choices(
        ["user", "answer", "call", "system"], [4, 3, 3, 1], k=random.randint(1, 8)
    )
    for step in steps:
        {
            "user": lambda: writer.say("user"),
            "answer": writer.answer,
            "call": writer.call,
            "system": lambda: writer.say(random.choice(["system", "developer"])),
        }[step]()
    if writer.messages[-1]["role"] == "assistant":
        random.choice([lambda: writer.say("user"), writer.call])()
    return History(writer.messages, writer.turns, writer.pairs)


def rendered(renderer: PromptRenderer, history: History) -> str:
    """Return the prompt of a history as a worker reads it from a body, without separators."""
    messages = read_messages(history.messages)[0]
    tools = TOOLS if any(one.get("tool_calls") for one in messages) else None
    return renderer.chat(messages, tools).replace("\ufdd0", "")


def faults(history: History, prompt: str) -> Sequence[str]:
    """Return what of a history a prompt lacks, or has elsewhere."""
    places = {word: prompt.find(word) for turn in history.turns for word in turn}
    lost = [word for word, place in places.items() if place < 0]
    if lost:
        return [f"{word} is lost" for word in lost]
    wrong = [
        f"{one[-1]} stands behind {other[0]}"
        for one, other in zip(history.turns, history.turns[1:], strict=False)
        if max(places[word] for word in one) > min(places[word] for word in other)
    ]
    return wrong + [
        f"{first} stands behind {second}"
        for first, second in history.pairs
        if places[first] > places[second]
    ]
