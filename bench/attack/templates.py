"""Bodies of clients on the chat templates of published models.

`python -m bench.attack.templates` downloads the source distribution of llama-cpp-python once, which
holds the templates of about seventy models, and gives every template the same random bodies, and
the plain ones of `bench.attack.chat_bodies`. A body takes the path of a request: the gateway parses
it, and a worker parses it again, renders it and tokenizes it. Whatever fails otherwise than by an
error of the request would be a 5xx. Then every template renders the same random histories, in which
each text, call and result must stand, in order; a table says what was changed for whom.
"""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from pydantic_core import to_json
from rich.console import Console
from starlette.requests import Request
from transformers import AutoTokenizer

from bench.attack.chat_bodies import Body, plain_bodies, random_body
from bench.gateway.contenders import gateway_parser
from bench.harness import tables
from gateway.errors import GatewayError
from gateway.event_loop import run
from gateway.protocols.openai import CHAT
from gateway.routing.view import FleetView
from gateway.strict_json import parse
from paceline.request.profile import Endpoint
from policies.document import default_policy
from tests.support.histories import History, faults, random_history, rendered
from tests.support.scripted_engine import CARD
from workers.demo import CHECKPOINT
from workers.engine.text.history_style import BEFORE, IN_TEXT, HistoryStyle
from workers.engine.text.tokenizer import PromptRenderer
from workers.engine.types import InvalidGeneration, LaneName, ModelCard
from workers.server.engines import ServingEngine
from workers.server.errors import as_request_error
from workers.server.pictures import PictureMemory
from workers.server.request import read_request

RESULTS: Final = Path(__file__).parents[1] / "results" / "templates.md"
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
_LISTED: Final = 4
_HISTORIES: Final = 5000
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
}
"""Fields of a `HistoryStyle`, as words."""
_CALL_CHANGES: Final = {
    "json_arguments": "arguments are JSON text",
    "in_text": "calls are text",
    "results_in_text": "results are words of the user",
    "short_ids": "ids of calls have nine letters",
    "named_ids": "ids of calls hold the names of functions",
}
_TEXT_CHANGES: Final = {
    BEFORE: "a text beside calls is an answer before them",
    IN_TEXT: "calls beside a text are text",
}
_WITH_TOOLS: Final = {kind for kind, body in plain_bodies().items() if body.get("tools")} - {
    "calls, and tool_choice none",
    "a nullable parameter",
}


class Outcome(NamedTuple):
    """The answer to one body."""

    status: int
    message: str = ""

    @property
    def kind(self) -> str:
        """Return the column of the answer."""
        if self.status >= 500:
            return "5xx"
        return "200" if self.status == 200 else _TEMPLATE if _TEMPLATE in self.message else "400"


class _Engine(NamedTuple):
    """What reading a request needs of an engine."""

    card: ModelCard
    prompts: PromptRenderer


@dataclass(slots=True)
class Tally:
    """The answers of the templates of one family."""

    templates: int = 0
    answers: Counter[str] = field(default_factory=Counter)


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
    """Return the family of a template."""
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
        self._policy = default_policy()
        self._fleet = FleetView.of((), frozenset())

    async def send(self, body: Body) -> dict[str, Outcome]:
        """Return the answer of every template; one, named "", where the gateway has rejected it."""
        raw = _encode({"model": _MODEL, **body})
        refused = None
        try:
            inspected = CHAT.inspect(parse(raw), self._policy, self._fleet)
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


def _encode(body: Any) -> bytes:
    """Return JSON as a client may write it, with escaped surrogates."""
    return json.dumps(body).encode()


async def _render(engine: _Engine, raw: bytes) -> Outcome:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw}

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


async def attack(models: Models, count: int, seed: int) -> tuple[dict[str, Tally], list[str]]:
    """Send random bodies; return the answers by family, and bodies that got a 5xx."""
    families: dict[str, Tally] = {}
    failures = []
    for name in models.engines:
        families.setdefault(family_of(name), Tally()).templates += 1
    for number in range(count):
        body = random_body(random.Random(f"{seed}.{number}"))
        for name, outcome in (await models.send(body)).items():
            tally = families.setdefault(family_of(name) if name else "the gateway", Tally())
            tally.answers[outcome.kind] += 1
            if outcome.status >= 500:
                failures.append(f"{seed}.{number} {name or 'gateway'}: {outcome.message}")
    return families, failures


async def refusals(models: Models) -> dict[str, dict[str, list[str]]]:
    """Return the plain bodies that were rejected, by message and template."""
    rejected: dict[str, dict[str, list[str]]] = {}
    for kind, body in plain_bodies().items():
        for name, outcome in (await models.send(body)).items():
            if outcome.status != 200:
                rejected.setdefault(outcome.message, {}).setdefault(name, []).append(kind)
    return rejected


def table(families: Mapping[str, Tally], count: int) -> tables.Grid:
    """Return the answers to the random bodies."""
    return tables.Grid(
        title=f"{count:,} random bodies on every template",
        columns=("family", "templates", "200", "400 of a field", "400 of the template", "5xx"),
        rows=tuple(
            (
                family,
                str(tally.templates),
                *(f"{tally.answers[kind]:,}" for kind in ("200", "400", _TEMPLATE, "5xx")),
            )
            for family, tally in families.items()
        ),
    )


def refusal_table(rejected: Mapping[str, Mapping[str, Sequence[str]]]) -> tables.Grid:
    """Return the messages to the plain bodies that were rejected."""
    return tables.Grid(
        title=f"{len(plain_bodies())} plain bodies on every template: the errors",
        columns=("message", "templates", "bodies"),
        rows=tuple(
            (
                message,
                f"{len(names)} templates" if len(names) > _LISTED else ", ".join(names),
                "with tools"
                if kinds >= _WITH_TOOLS
                else f"{len(kinds)}: {'; '.join(sorted(kinds))}",
            )
            for message, names in rejected.items()
            for kinds in [{kind for kinds in names.values() for kind in kinds}]
        ),
    )


def changes_of(style: HistoryStyle) -> str:
    """Return in words what is changed of a history for a template."""
    default = HistoryStyle()
    changes = [
        words for name, words in _CHANGES.items() if getattr(style, name) != getattr(default, name)
    ]
    changes += [words for name, words in _CALL_CHANGES.items() if getattr(style.calls, name)]
    changes += [words for place, words in _TEXT_CHANGES.items() if style.text_with_calls == place]
    return "; ".join(changes) or "nothing"


def history_table(models: Models, count: int) -> tables.Grid:
    """Return what was changed for each template, and the histories that then failed."""
    histories = [random_history(random.Random(f"history {number}")) for number in range(count)]
    names: dict[str, list[str]] = {}
    failed: Counter[str] = Counter()
    for name, engine in models.engines.items():
        changes = changes_of(engine.prompts.history_style)
        names.setdefault(changes, []).append(name)
        failed[changes] += sum(_fails(engine.prompts, history) for history in histories)
    return tables.Grid(
        title=f"{count:,} random histories on every template: what was changed",
        columns=("changed", "templates", "refused, or not whole"),
        rows=tuple(
            (changes, ", ".join(names[changes]), str(failed[changes])) for changes in sorted(names)
        ),
    )


def _fails(renderer: PromptRenderer, history: History) -> bool:
    try:
        return bool(faults(history, rendered(renderer, history)))
    except InvalidGeneration:
        return True


def main(arguments: Sequence[str] | None = None) -> None:
    parser = gateway_parser("bench.attack.templates", __doc__)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    logging.disable(logging.ERROR)  # a line for every rejected body
    count = 20 if options.quick else _BODIES
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    with console.status("attacking"):
        models = Models(fetch(options.log_dir / "templates"))
        rejected = run(refusals(models))
        families, failures = run(attack(models, count, options.seed))
        histories = history_table(models, 20 if options.quick else _HISTORIES)
    grids = (table(families, count), refusal_table(rejected), histories)
    for grid in grids:
        console.print(grid.to_table())
    for failure in failures[:20]:
        console.print(failure, markup=False)
    if not options.quick:
        page = f"{tables.provenance()}. Seed {options.seed}, templates of {SOURCE}."
        tables.write_page(RESULTS, "Chat templates", page, *grids)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
