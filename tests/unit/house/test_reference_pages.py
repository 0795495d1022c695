"""Pages list exactly the errors, settings, headers, fields, files and tests that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from gateway.auth.records import KeyTerms
from gateway.config.settings import Settings
from gateway.errors import GatewayError, LimitReached, WorkerError
from paceline.http import NotHttp
from paceline.protocol import ApiError
from paceline.request.fields import FieldError
from paceline.request.keys import KEYS
from paceline.request.wires import (
    HONOURED,
    IGNORED,
    IGNORED_ON,
    INSTEAD,
    NEUTRAL,
    Wire,
    neutral_values,
    read_ignored,
)
from workers.server.errors import RequestError
from workers.server.main import worker_command
from workers.settings import WorkerSettings

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs/reference"
LIMITS = ("requests_a_minute", "tokens_a_minute", "concurrent_requests", "tokens_a_day")
TEXT_WIRES = (Wire.CHAT, Wire.COMPLETIONS, Wire.RESPONSES, Wire.MESSAGES)
GROUPS = {WorkerError}
"""Classes that are never raised themselves."""


def subclasses(base: type[Exception]) -> Iterator[type[Exception]]:
    yield base
    for subclass in base.__subclasses__():
        yield from subclasses(subclass)


def class_codes(base: type[Exception]) -> set[str]:
    """Return the codes that the classes of an error tree set themselves."""
    codes = {vars(cls).get("code") for cls in subclasses(base) if cls not in GROUPS}
    return {code for code in codes if isinstance(code, str)}


def literal_codes(folder: Path) -> set[str]:
    """Return the codes that the files of a folder pass as an argument."""
    text = "".join(file.read_text() for file in folder.rglob("*.py"))
    return set(re.findall(r'\bcode(?:: str(?: \| None)?)? ?= ?"(\w+)"', text))


def test_the_page_on_errors_names_exactly_the_codes_of_the_error_trees() -> None:
    page = (REFERENCE / "errors.md").read_text()
    documented = re.findall(r"^\| `(\w+)` \| \d", page, re.MULTILINE)
    assert len(documented) == len(set(documented)), "a code has a single row"

    assert set(LIMITS) <= KeyTerms.model_fields.keys()
    limits = {LimitReached(name, 1, 1.0).code for name in LIMITS}
    engine = literal_codes(ROOT / "workers/engine") | literal_codes(ROOT / "workers/server")
    gateway = literal_codes(ROOT / "gateway/api") | literal_codes(ROOT / "gateway/protocols")
    assert RequestError in ApiError.__subclasses__()
    codes = class_codes(ApiError) | limits | engine | gateway
    assert set(documented) == codes


def test_the_page_on_errors_names_the_status_and_type_of_each_class() -> None:
    page = (REFERENCE / "errors.md").read_text()
    rows = {
        code: (int(status), kind or "invalid_request_error")
        for code, status, kind in re.findall(
            r"^\| `(\w+)` \| (\d+) \| (?:`(\w+)` )?\|", page, re.MULTILINE
        )
    }
    for cls in (*subclasses(GatewayError), *subclasses(NotHttp)):
        if cls not in GROUPS and issubclass(cls, ApiError) and "code" in vars(cls):
            assert rows[cls.code] == (cls.status, cls.type), cls


def test_the_page_on_settings_names_exactly_the_settings_of_gateway_and_worker() -> None:
    page = (REFERENCE / "settings.md").read_text()
    of_gateway, _, of_worker = page.partition("## The worker")
    rows = "\n".join(line for line in of_gateway.splitlines() if line.startswith("|"))
    documented = set(re.findall(r"`PACELINE_(\w+)`", rows))
    gateway = {name.upper() for name in Settings.model_fields} - {"WORKERS", "WORKER"}
    assert documented == gateway | {"CONFIG"}
    assert "`workers`" in page
    assert "`worker`" in page
    assert [line for line in of_worker.splitlines() if line.startswith("| `--")] == [
        *rows_of_worker()
    ]


def rows_of_worker() -> Iterator[str]:
    """Yield a row for each flag of a worker, with the docstring of its setting."""
    for option in worker_command(print).params:
        if isinstance(option, click.Option) and option.name != "config":
            field = WorkerSettings.model_fields[str(option.name)]
            given = field.validation_alias or f"PACELINE_WORKER_{str(option.name).upper()}"
            yield f"| `{option.opts[0]}` | `{given}` | {option.help} |"


def test_the_page_on_headers_names_exactly_the_headers_of_paceline() -> None:
    documented = set(re.findall(r"`(x-paceline-[a-z-]+)`", (REFERENCE / "headers.md").read_text()))
    sources = (
        file
        for folder in ("gateway", "paceline", "workers")
        for file in ROOT.glob(f"{folder}/**/*.py")
    )
    text = "".join(file.read_text() for file in sources)
    assert documented == set(re.findall(r'b?"(x-paceline-[a-z-]+)"', text))


def test_the_page_on_requests_names_exactly_the_fields_that_openai_does_not_have() -> None:
    page = (REFERENCE / "requests.md").read_text()
    pooling = {"## Embeddings": Wire.EMBEDDINGS, "## Rerank": Wire.RERANK}
    sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    for title, wire in pooling.items():
        (section,) = [one for one in sections if one.startswith(title)]
        assert documented_fields(section) == HONOURED[wire] - {"model"}
    others = (*pooling, "## Fields and wires")
    chats = "".join(one for one in sections if not one.startswith(others))
    openai = {*CompletionCreateParamsBase.__annotations__, "stream"}
    assert documented_fields(chats) == HONOURED[Wire.CHAT] - openai


def test_the_page_on_requests_says_what_each_wire_does_with_each_field() -> None:
    page = (REFERENCE / "requests.md").read_text()
    section = page.partition("## Fields and wires")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [*rows_of_fields(), *rows_of_names()]


def rows_of_fields() -> Iterator[str]:
    """Yield the rows of the table of fields; those that have the same fates share one."""
    others = {name for _, name in INSTEAD}
    known = others.union(IGNORED, NEUTRAL, *IGNORED_ON.values())
    fates: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(known.union(*(HONOURED[wire] for wire in TEXT_WIRES))):
        fates.setdefault(tuple(fate(name, wire) for wire in TEXT_WIRES), []).append(f"`{name}`")
    for fate_of_wires, names in sorted(fates.items(), key=lambda one: one[1]):
        yield f"| {', '.join(names)} | {' | '.join(fate_of_wires)} |"


def fate(name: str, wire: Wire) -> str:
    """Return what a wire does with a field, as its parser does it."""
    if name in ("functions", "function_call") and wire is Wire.CHAT:
        return "yes"  # a gateway makes tools of them
    try:
        ignored = read_ignored({name: object()}, wire)
        refused = ""
    except FieldError as error:
        ignored = ()
        instead = re.search("use '(.*)'", error.message)
        refused = f"use `{instead[1]}`" if instead else "no"
    if not refused:
        return "ignored" if ignored else "yes"
    values = [value for value in neutral_values(wire).get(name, ()) if value != ""]
    shown = ", ".join(f"`{json.dumps(value)}`" for value in values)
    return f"{shown} ignored, else {refused}" if shown else refused


def rows_of_names() -> Iterator[str]:
    """Yield a row for each object within which names are ignored."""
    for place, (_, ignored) in KEYS.items():
        wire, _, field = place.partition(" ")
        if names := ", ".join(f"`{name}`" for name in sorted(ignored)):
            yield f"| `{field}` | `{Wire[wire]}` | {names} |"


def documented_fields(text: str) -> set[str]:
    """Return the fields in the first column of the tables of a text."""
    names = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    return {field for row in names for field in re.findall(r"`(\w+)`", row)}


def test_every_python_file_named_by_a_page_exists() -> None:
    names = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")):
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
            if "/" in name:
                assert (ROOT / name).exists() or (ROOT / "gateway" / name).exists(), (page, name)
            else:
                assert name in names, (page, name)


def test_the_page_on_reliability_has_a_row_for_each_numbered_test_and_no_other() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    rows = set(re.findall(r"^\| ([FCLN]\d+) \|", page, re.MULTILINE))
    tests = {
        number.upper()
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def test_((?:[fcln]\d+_)+)", file.read_text())
        for number in re.findall(r"[fcln]\d+", name)
    }
    assert rows == tests


def test_each_example_of_the_page_on_the_policy_is_part_of_a_whole_document() -> None:
    page = (ROOT / "docs/policy.md").read_text().partition("## Examples")[2].partition("\n## ")[0]
    for name, block in re.findall(r"examples/(\w+\.yaml)\).*?```yaml\n(.*?)```", page, re.DOTALL):
        assert block in (ROOT / "policies/examples" / name).read_text(), name
