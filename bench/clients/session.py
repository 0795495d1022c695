"""A long session of an agent, in which a script plays the model: its files, and what arrives.

Each turn is a process of its own that continues the session. The programs have no Python packages
of their own, and so run where the project is installed.
"""

import json
import os
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image

from bench.clients.cases import check, get, once
from bench.clients.mcp_server import NEST, TOOL
from tests.support.pdfs import pdf

Chat = dict[str, Any]
Call = tuple[str, dict[str, Any]]

WORKER_URL = os.environ.get("BENCH_WORKER_URL", "")
MCP_SERVER = Path(__file__).with_name("mcp_server.py")
PDF, PDF_TEXT = "report.pdf", "The otter swims at dawn."
PICTURE = "picture.png"
LONG = "long.txt"
FOUND = f"mcp__notes__{TOOL}"
"""The tool of the server that an agent finds by a search."""
ENDED, SUMMARY = "The script has ended.", "This is the summary of the script."
"""What the model says after its last call, and when it is to summarise."""


def write_files() -> None:
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


def search_compact_and_continue(
    go_on: Callable[[str], str], search: Call, read: Call, turns: tuple[int, int], window: int
) -> None:
    """Add the cases that end the session of any agent, whose turns read the long file so often."""
    refused = refusals()

    @once("searches its tools, and calls what it found (scripted: both calls)")
    def searches() -> str:
        asked, found, told = play(go_on, search, (FOUND, {}))
        check(FOUND not in tools_of(asked) and FOUND in tools_of(found), tools_of(found))
        check(NEST in text_of(told), text_of(told)[-300:])
        return f"{TOOL} was no tool of the model before the search"

    @once(f"compacts twice (scripted: {sum(turns)} calls of {read[0]}, both summaries)")
    def compacts() -> str:
        found = compactions(
            [chat for turn in turns for chat in play(go_on, *[read] * turn)], window
        )
        check(len(found) == 2, found)
        return f"{', '.join(found)}; the model has {window:,}"

    @once("is continued after its end, and had no request refused (scripted: the answer)")
    def continued() -> str:
        told = play(go_on)[-1]
        check(SUMMARY in text_of(told), text_of(told)[:300])
        check(refusals() == refused, f"{refusals() - refused} requests refused")
        return "the model got the summary and what followed it"


def compactions(chats: list[Chat], window: int) -> list[str]:
    """Return how each compaction has shortened the conversation, which filled half the window."""
    sizes = [chat["prompt_tokens"] for chat in chats]
    check(max(sizes) < window, sizes)
    found = [(before, after) for before, after in pairwise(sizes) if after < before * 3 / 4]
    check(all(before > window / 2 for before, _ in found), sizes)
    return [f"{before:,} to {after:,} tokens" for before, after in found]


def text_of(chat: Chat) -> str:
    return "\n".join(part["text"] for part in _parts(chat) if part["type"] == "text")


def pictures_of(chat: Chat) -> list[str]:
    """Return the pictures of a chat, as `data:` URLs."""
    return [part["image_url"]["url"] for part in _parts(chat) if part["type"] == "image_url"]


def tools_of(chat: Chat) -> list[str]:
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
