"""Abuse of keys: revoked keys, other teams' prompts, forbidden models, admin routes."""

from __future__ import annotations

import json
from random import Random
from typing import Any, Final

from bench.attack.attack import Attack
from bench.attack.http_client import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    chat_body,
    connection,
    encode,
    send,
)
from bench.attack.liar import ENDLESS
from bench.attack.liar import MODEL as LIAR
from bench.harness.parts import JOIN_TOKEN

_MODEL: Final = "demo"
_ROLES: Final = ("user", "assistant", "user")
_WORDS: Final = "the of and to a in is it you that he was for on are with as his they".split()
_ADMIN: Final = (
    *("keys", "policy", "workers", "usage", "policy/versions", "keys/static"),
    "workers/demo/cordon",
)


def random_text(chance: Random, words: int) -> str:
    return " ".join(chance.choices(_WORDS, k=words))


class KeyAbuse(Attack):
    """Clients with keys that want more than their keys allow."""

    name = "keys"
    promise = "nothing of others, no admin route"
    share = 0.06

    async def prepare(self) -> None:
        revoked = await self.target.create_key("revoked")
        await self._revoke(revoked)
        self._revoked = revoked["secret"]
        self._forbidden = (await self.target.create_key("forbidden", models=[LIAR]))["secret"]
        self._teams = [
            (await self.target.create_key(team, team=team))["secret"] for team in ("red", "blue")
        ]

    async def one(self, chance: Random) -> None:
        match chance.randrange(8):
            case 0:
                await self._share_prompt(chance)
            case 1 if chance.random() < 0.2:
                await self._revoke_in_stream(chance)
            case 2:
                await self._refused(self._revoked, 401, chance)
            case 3:
                await self._refused(self._forbidden, 404, chance)
            case 4:
                guess = chance.choice(("x", "pk-", "pk-" + "A" * 43, "é", "a" * 8000))
                await self._refused(guess, 401, chance)
            case _:
                secrets = ("", self.target.key, JOIN_TOKEN, self._revoked, "x")
                await self._open_admin(chance.choice(secrets), chance)

    async def _revoke(self, key: dict[str, Any]) -> None:
        await self.target.admin(f"keys/{key['id']}", method="DELETE")

    async def _share_prompt(self, chance: Random) -> None:
        """Send a conversation of another team: nothing of it may come from a cache."""
        secret = f"{chance.getrandbits(64):x} " + random_text(chance, chance.choice((10, 30, 80)))
        path = chance.choice((CHAT, CHAT, MESSAGES, RESPONSES, COMPLETIONS))
        turns = [secret, random_text(chance, 40), "Go on."]
        said = [{"role": role, "content": turn} for role, turn in zip(_ROLES, turns, strict=True)]
        fields: dict[str, Any] = {
            CHAT: {"messages": [{"role": "system", "content": secret}, *said], "max_tokens": 1},
            MESSAGES: {"system": secret, "messages": said, "max_tokens": 1},
            RESPONSES: {"instructions": secret, "input": said, "max_output_tokens": 1},
            COMPLETIONS: {"prompt": [f"{secret} {secret}", " ".join(turns)], "max_tokens": 1},
        }[path]
        body = {"model": _MODEL, "temperature": 0, **fields}
        for key in chance.sample(self._teams, 2):
            answer = await self.ask(body, path, key=key, honest=True)
            if answer.status == 200 and answer.cached_tokens():
                self.tally.fail("cached tokens of another team's conversation", (path, body))

    async def _revoke_in_stream(self, chance: Random) -> None:
        key = await self.target.create_key("short-lived")
        text = f"{ENDLESS} {chance.getrandbits(48):x}"
        body = json.dumps(chat_body(LIAR, text, stream=True)).encode()
        request_id = self.target.request_id("revoked")
        self.tally.begin(text)
        async with connection(self.target.gateway_port) as opened:
            await opened.send(encode(body, key=key["secret"], request_id=request_id))
            first = await opened.read_some()
            self.target.sent.add(request_id)
            await self._revoke(key)
            last = first
            while piece := await opened.read_some():
                last = (last + piece)[-2000:]
        self.tally.answers["revoked in a stream"] += 1
        if b'"key_revoked"' not in last and first.startswith(b"HTTP/1.1 200"):
            self.tally.fail("a revoked key read on", last[-200:])

    async def _refused(self, secret: str, status: int, chance: Random) -> None:
        body = chat_body(_MODEL, "Hi", max_tokens=1, stream=chance.random() < 0.5)
        answer = await self.ask(body, key=secret)
        if answer.status != status:
            self.tally.fail(f"{answer.status} instead of {status}", (secret[:20], body))

    async def _open_admin(self, secret: str, chance: Random) -> None:
        path, method = chance.choice(_ADMIN), chance.choice(("GET", "POST", "PUT", "DELETE"))
        headers = chance.choice(
            ((), ("x-forwarded-for: 127.0.0.1",), ("origin: http://localhost",))
        )
        body = b'{"name": "x"}' if method != "GET" else None
        path = f"/admin/v1/{path}"
        raw = encode(body, path=path, method=method, key=secret, headers=headers)
        self.tally.begin(raw)
        answer = await send(self.target.gateway_port, raw)
        self.tally.answer(answer, raw)
        if answer.status not in (401, 403, 404, 405):
            self.tally.fail(f"{answer.status} for an admin route without the admin key", raw)
