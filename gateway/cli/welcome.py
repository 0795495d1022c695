"""What `paceline up` prints once requests are answered: plain text, ready to be pasted."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from gateway.config.startup_checks import is_loopback

_SNIPPET = """\
from openai import OpenAI

client = OpenAI(base_url="{address}/v1", api_key={api_key})
answer = client.chat.completions.create(
    model="{model}",
    temperature=0,  # greedy text takes the speculative lane
    messages=[{{"role": "user", "content": "{question}"}}],
)
print(answer.choices[0].message.content)"""

# Answered by the demo model as it was trained to; any real model knows the answer too.
_QUESTION = "Count from 1 to 20."

_JOIN = """\
Another Mac joins with
    {command} worker --join {address} --token {token} --model NAME"""

_OPEN_FIRST = """\
Only this machine reaches the gateway now. To let other Macs in, make a key for your clients, then
start it anew with
    {command} keys create NAME
    {command} up --host 0.0.0.0"""


_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - recognised, not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A running gateway and its own worker, as the person who started them sees it."""

    address: str
    host: str
    """What the gateway was told to listen on."""
    model: str
    join_token: str
    keyed: bool
    """Clients must bring a key."""
    command: str
    """How this command is typed here."""


def welcome(started: Started) -> str:
    """Say where the gateway runs, how to use it, and how another Mac joins it."""
    alone = is_loopback(started.host)
    from_here = on_this_machine(started.address)
    from_elsewhere = (
        _at(_network_address(), started.address) if alone else _reachable(started.address)
    )
    snippet = _SNIPPET.format(
        address=from_here,
        api_key='os.environ["PACELINE_API_KEY"]' if started.keyed else '"none"',
        model=started.model,
        question=_QUESTION,
    )
    shown = from_here if alone else from_elsewhere
    return "\n\n".join(
        (
            f"Paceline is ready on {shown} (model {started.model}).\n"
            f"See what it does on {shown}/dashboard.",
            ("import os\n" if started.keyed else "") + snippet,
            *((_OPEN_FIRST.format(command=started.command),) if alone else ()),
            _JOIN.format(command=started.command, address=from_elsewhere, token=started.join_token),
        )
    )


def on_this_machine(address: str) -> str:
    """Return the address as this machine itself reaches it: a wildcard is no destination."""
    loopback = _LOOPBACK_OF.get(urlsplit(address).hostname or "")
    return _at(loopback, address) if loopback else address


def _reachable(address: str) -> str:
    wildcard = urlsplit(address).hostname in _LOOPBACK_OF
    return _at(_network_address(), address) if wildcard else address


def _at(host: str, address: str) -> str:
    parts = urlsplit(address)
    return f"{parts.scheme}://{host}:{parts.port}"


def _network_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: connecting a datagram socket only picks the interface.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])
