"""Bodies of clients on the chat templates of published models.

`python -m bench.attack.templates` downloads the source distribution of llama-cpp-python once, which
holds the templates of about seventy models, and gives every template the same random histories with
odd values. A body takes the path of a request: the gateway parses it, and a worker parses it again,
renders it and tokenizes it. Whatever fails otherwise than by an error of the request would be a
5xx. Then every template renders the histories without those values, in which each text, call and
result must stand, in order; a table says what was changed for whom.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from pydantic_core import to_json
from starlette.requests import Request
from transformers import AutoTokenizer

from bench.attack.mutations import mutate
from bench.harness.options import parser
from bench.harness.tables import Grid, console, provenance, report, show
from gateway.errors import GatewayError
from gateway.event_loop import run
from gateway.protocols.openai import CHAT, InspectionContext
from gateway.routing.view import FleetView
from gateway.strict_json import parse
from paceline.request.profile import Endpoint
from policies.document import default_policy
from tests.support.histories import TOOLS, History, faults, random_history, rendered
from tests.support.scripted_engine import CARD
from workers.demo import CHECKPOINT
from workers.engine.text.template_support import BEFORE, IN_TEXT, TemplateLimits
from workers.engine.text.tokenizer import PromptRenderer
from workers.engine.types import InvalidGeneration, LaneName, ModelCard
from workers.server.engines import ServingEngine
from workers.server.errors import as_request_error
from workers.server.pictures import PictureMemory
from workers.server.request import read_request

SOURCE: Final = "llama-cpp-python==0.3.36"
FURTHER: Final = ("trl==1.16.0", "axolotl==0.19.0")
"""Distributions whose wheels hold published templates that the first collection lacks."""
_MODEL: Final = "model"
_BODIES: Final = 5000
_TEMPLATE: Final = "chat template"
_FAMILIES: Final = (
    *("gemma", "gpt-oss", "Hermes", "Kimi", "GLM", "Qwen", "QwQ", "DeepSeek", "Llama", "Phi"),
    *("Mistral", "Ministral", "Devstral", "command-r", "granite", "Nemotron", "MiniMax", "LFM"),
)
"""Words in the names of templates; the first that matches is the family."""
_CHANGES: Final = {
    "parts": "contents are lists of parts",
    "users": "messages of the user in a row are one",
    "system": "a system message is words of the user",
    "systems": "system messages at the front are one",
    "system_inside": "a system message behind others is words of the user in its place",
    "assistants": "answers in a row are one",
    "empty": "an answer without content is left out",
    "reasoning": "reasoning beside a text and a call is left out",
    "opens": "a message of the user stands before an answer that begins a chat",
    "userless": "a chat without a user gets a message of one",
    "parallel_calls": "each of several calls is followed by its result",
    "user_after_result": "words of the user behind a result are part of it",
    "json_arguments": "arguments are JSON text",
    "calls_in_text": "calls are text",
    "results_in_text": "results are words of the user",
}
"""Fields of `TemplateLimits`, as words."""
_TEXT_CHANGES: Final = {
    BEFORE: "a text beside calls is an answer before them",
    IN_TEXT: "calls beside a text are text",
}
_ODD: Final[tuple[Any, ...]] = (
    *(None, True, -5, 0, 3, 1e308, -0.0, 0.1, 10**18, 2**64, 10**400, [], {}, [[]], {"a": [{}]}),
    *('{"a":' * 900 + "1" + "}" * 900, '{"a":' * 20_000, '{"a": [1', "none", "auto", "call00001"),
    *("", " ", "\n", "Hello", "{{ 7 * 7 }}", "{% for x in y %}", "<think>", "</think>", "null"),
    *("<|im_start|>", "<|im_end|>\n<|im_start|>system", "[INST]", "</s>", "<tool_call>", "\x00"),
    *("é", "日本語", "👩‍👩‍👧", "\u202e", "\ufdd0", "\U0010ffff", "\ud800", "a" * 500, "%s %d {0}"),
)

Body = dict[str, Any]


def random_body(rng: random.Random) -> Body:
    """Return a random history with one to three odd values, in any place."""
    body: Body = {"messages": random_history(rng).messages}
    if rng.random() < 0.7:
        body["tools"] = deepcopy(TOOLS)
    if rng.random() < 0.2:
        body["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.5}
    mutate(body, rng, _ODD, changes=(1, 2, 3))
    return body


class Outcome(NamedTuple):
    """The answer to one body."""

    status: int
    message: str = ""

    @property
    def kind(self) -> str:
        if self.status >= 500:
            return "5xx"
        return "200" if self.status == 200 else _TEMPLATE if _TEMPLATE in self.message else "400"


class _Engine(NamedTuple):
    """What reading a request needs of an engine."""

    card: ModelCard
    prompts: PromptRenderer


def fetch(folder: Path) -> dict[str, str]:
    """Return the templates by name; download their archive unless the folder has it."""
    archive = _download(folder, SOURCE, "--no-binary")
    return dict(sorted((Path(name).stem, text) for name, text in _members(archive)))


def fetch_further(folder: Path) -> dict[str, str]:
    """Return templates of the further collections, by the names of collection and template."""
    texts = {}
    for source in FURTHER:
        collection = source.partition("==")[0]
        for name, text in _members(_download(folder, source, "--only-binary")):
            texts[f"{collection}/{Path(name).stem}"] = text
    return texts


def _download(folder: Path, source: str, kind: str) -> Path:
    """Return the archive of a distribution; download it unless the folder has it."""
    name, _, version = source.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}*"
    if not list(folder.glob(pattern)):
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        subprocess.run((*pip, kind, name, "--dest", str(folder), source), check=True)
    return next(folder.glob(pattern))


def _members(archive: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the templates in a wheel or a source distribution."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in filter(_is_template, wheel.namelist()):
                yield name, wheel.read(name).decode()
        return
    with tarfile.open(archive) as source:
        for member in source:
            if _is_template(member.name):
                content = source.extractfile(member)
                assert content is not None
                yield member.name, content.read().decode()


def _is_template(name: str) -> bool:
    place = Path(name)
    return place.suffix == ".jinja" and place.parent.name in {"templates", "chat_templates"}


def family_of(name: str) -> str:
    matching = (family for family in _FAMILIES if family.lower() in name.lower())
    return next(matching, "others")


class Models:
    """A worker's reading of requests for each of several chat templates."""

    def __init__(self, templates: Mapping[str, str]) -> None:
        tokenizer = AutoTokenizer.from_pretrained(str(CHECKPOINT))
        tokenizer.bos_token = (
            tokenizer.bos_token or tokenizer.eos_token
        )  # templates add texts to it
        self.engines: dict[str, _Engine] = {}
        for name, template in templates.items():
            templated = copy(tokenizer)
            # Models with a template for tools alone have another one without them.
            named = {"default": tokenizer.chat_template, "tool_use": template}
            templated.chat_template = named if "tool_use" in name else template
            self.engines[name] = _Engine(_CARD, PromptRenderer(templated))
        self._context = InspectionContext(default_policy(), FleetView.of((), frozenset()))

    async def send(self, body: Body) -> dict[str, Outcome]:
        """Return the answer of every template; one, named "", where the gateway has rejected it."""
        raw = json.dumps({"model": _MODEL, **body}).encode()
        refused = None
        try:
            inspected = CHAT.inspect(parse(raw), self._context)
            raw = to_json(inspected.body, inf_nan_mode="null")
        except GatewayError as error:
            # The port of a worker gets such bodies from its own clients.
            refused = Outcome(error.status, error.message)
        except Exception as error:  # noqa: BLE001 - a failure is what the attack looks for
            return {"": Outcome(500, repr(error))}
        answers = {name: await _render(engine, raw) for name, engine in self.engines.items()}
        if refused is None:
            return answers
        return {"": refused} | {name: one for name, one in answers.items() if one.status >= 500}


_CARD: Final = replace(
    CARD, model=_MODEL, lanes=(LaneName.VLM,), context_tokens=1 << 20, vision=False, mtp=False
)


async def _render(engine: _Engine, raw: bytes) -> Outcome:
    messages = [{"type": "http.request", "body": raw}]

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()  # the client stays
        return messages.pop()

    scope = {"type": "http", "headers": [], "state": {"request_id": "attack"}}
    try:
        request = Request(scope, receive)
        serving = cast("ServingEngine", engine)
        read = await read_request(request, serving, PictureMemory(), Endpoint.CHAT, 0)
        engine.prompts.prepare(read.generations[0].prompt)
    except Exception as error:  # noqa: BLE001 - a worker answers whatever is raised
        answer = as_request_error(error)
        told = answer.message if answer.status < 500 else f"{answer.message} {error!r:.300}"
        return Outcome(answer.status, told)
    return Outcome(200)


async def attack(models: Models, count: int, seed: int) -> tuple[Grid, list[str]]:
    """Send random bodies; return the answers by family, and bodies that got a 5xx."""
    templates = Counter(map(family_of, models.engines))
    answers: dict[str, Counter[str]] = {family: Counter() for family in templates}
    failures = []
    for number in range(count):
        body = random_body(random.Random(f"{seed}.{number}"))
        for name, outcome in (await models.send(body)).items():
            family = family_of(name) if name else "the gateway"
            answers.setdefault(family, Counter())[outcome.kind] += 1
            if outcome.status >= 500:
                failures.append(f"{seed}.{number} {name or 'gateway'}: {outcome.message}")
    kinds = ("200", "400", _TEMPLATE, "5xx")
    columns = ("family", "templates", "200", "400 of a field", "400 of the template", "5xx")
    rows = [
        (family, templates[family], *(f"{counts[kind]:,}" for kind in kinds))
        for family, counts in answers.items()
    ]
    return Grid(f"{count:,} random bodies on every template", columns, rows), failures


def changes_of(limits: TemplateLimits) -> str:
    """Return in words what is changed of a history for a template."""
    default = TemplateLimits()
    changes = [
        words for name, words in _CHANGES.items() if getattr(limits, name) != getattr(default, name)
    ]
    changes += [words for place, words in _TEXT_CHANGES.items() if limits.text_with_calls == place]
    return "; ".join(changes) or "nothing"


def history_table(models: Models, count: int) -> Grid:
    """Return what was changed for each template, and the histories that then failed."""
    histories = [random_history(random.Random(f"history {number}")) for number in range(count)]
    names: dict[str, list[str]] = {}
    failed: Counter[str] = Counter()
    for name, engine in models.engines.items():
        changes = changes_of(engine.prompts.limits)
        names.setdefault(changes, []).append(name)
        failed[changes] += sum(_fails(engine.prompts, history) for history in histories)
    title = f"{count:,} random histories on every template: what was changed"
    rows = [(changes, ", ".join(names[changes]), failed[changes]) for changes in sorted(names)]
    return Grid(title, ("changed", "templates", "refused, or not whole"), rows)


def _fails(renderer: PromptRenderer, history: History) -> bool:
    try:
        return bool(faults(history, rendered(renderer, history)))
    except InvalidGeneration:
        return True


def main() -> None:
    made = parser("attack.templates", __doc__)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--count", type=int, default=_BODIES, help="bodies, and histories")
    options = made.parse_args()
    logging.disable(logging.ERROR)  # a line for every rejected body
    count: int = 20 if options.quick else options.count
    with console().status("attacking"):
        models = Models(fetch(options.folder / "templates"))
        answers, failures = run(attack(models, count, options.seed))
        histories = history_table(models, count)
    about = f"{provenance()}. Seed {options.seed}, templates of {SOURCE}."
    report("templates.md", "Chat templates", about, answers, histories, write=not options.quick)
    show(*failures[:20])
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
