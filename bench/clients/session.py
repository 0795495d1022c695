"""A long session of an agent, in which a script plays the model: its files, and what arrives.

Each turn is a process of its own that continues the session. The programs have no Python packages
of their own, and so run where the project is installed.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image

from bench.clients.cases import check, get
from tests.support.pdfs import pdf

Chat = dict[str, Any]
Call = tuple[str, dict[str, Any]]

WORKER_URL = os.environ.get("BENCH_WORKER_URL", "")
MCP_SERVER = Path(__file__).with_name("mcp_server.py")
PDF, PDF_TEXT = "report.pdf", "The otter swims at dawn."
PICTURE = "picture.png"
LONG = "long.txt"
ENDED, SUMMARY = "The script has ended.", "This is the summary of the script."
"""What the model says after its last call, and when it is to summarise."""


def write_files() -> None:
    """Write what the agent reads."""
    Path(PDF).write_bytes(pdf(PDF_TEXT))
    Image.new("RGB", (64, 64), "red").save(PICTURE)
    Path(LONG).write_text("".join(f"line {number} of many\n" for number in range(1_200)))


def play(run: Callable[[str], str], *calls: Call) -> list[Chat]:
    """Return the chats that the model receives in a turn in which it makes these calls."""
    earlier = [chat["id"] for chat in _received()]
    lines = [f"PLAY {name} {json.dumps(arguments)}" for name, arguments in calls]
    printed = run("\n".join(["PLAY:", *lines]))
    check(ENDED in printed, printed[-300:])
    return [chat for chat in _received() if chat["id"] not in earlier]


def compactions(chats: list[Chat], window: int) -> list[str]:
    """Return how each compaction has shortened the conversation, which filled half the window."""
    sizes = [chat["prompt_tokens"] for chat in chats]
    check(max(sizes) < window, sizes)
    found = [(before, after) for before, after in pairwise(sizes) if after < before * 3 / 4]
    check(all(before > window / 2 for before, _ in found), sizes)
    return [f"{before:,} to {after:,} tokens" for before, after in found]


def text_of(chat: Chat) -> str:
    """Return the messages of a chat as a text."""
    return "\n".join(part["text"] for part in _parts(chat) if part["type"] == "text")


def pictures_of(chat: Chat) -> list[str]:
    """Return the pictures of a chat, as `data:` URLs."""
    return [part["image_url"]["url"] for part in _parts(chat) if part["type"] == "image_url"]


def tools_of(chat: Chat) -> list[str]:
    """Return the names of the tools of a chat."""
    return [tool["function"]["name"] for tool in chat.get("tools") or ()]


def refusals() -> int:
    """Return how many requests the gateway has answered with an error of the client."""
    return int(json.loads(get("/v1/status"))["outcomes"].get("refused", 0))


def _parts(chat: Chat) -> list[Any]:
    parts: list[Any] = []
    for message in chat["messages"]:
        content = message["content"] or ""
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _received() -> list[Chat]:
    with urllib.request.urlopen(f"{WORKER_URL}/received", timeout=30) as response:
        found: list[Chat] = json.load(response)
        return found
