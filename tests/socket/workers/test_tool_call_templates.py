"""Tool calls through the chat templates of published models, and back; and any history."""

import subprocess
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from bench.attack.templates import fetch, fetch_further
from bench.families.chat import check_chat
from bench.families.configs import FAMILIES
from tests.support.histories import faults, random_history, rendered
from tests.support.tool_call_text import format_name, renderer_of, round_trips
from workers.engine.text.tool_formats import FORMATS

SHOWN = {
    "DeepSeek-R1": "deepseek_v3",
    "DeepSeek-V3.1": "deepseek_v3",
    "functionary-medium-v3.1": "functionary_v3.1",
    "functionary-medium-v3.2": "functionary_v3.2",
    "gpt-oss": "harmony",
    "granite-3.3": "granite",
    "granite-4.0": "json_tools",
    "Hermes-3": "json_tools",
    "Llama-3.1": "llama3",
    "Llama-3.3": "llama3",
    "Llama4": "llama4",
    "Nemotron-Nano-v2": "nemotron",
}
"""Families that mlx-vlm has no parser of, and two that it has."""
WITHOUT_TEMPLATE = {"gigachat3.5", "hunyuan3_preview", "longcat", "naive", "phi4"}
"""Formats of which the collections hold no template."""
TEMPLATES_OF_FAMILIES = sorted({one.template for one in FAMILIES if one.template})


@pytest.fixture(scope="module")
def templates(pytestconfig: pytest.Config) -> dict[str, str]:
    """Return the templates, which the first run downloads."""
    cache = pytestconfig.cache
    assert cache is not None
    folder = cache.mkdir("chat_templates")
    try:
        return {**fetch(Path(folder)), **fetch_further(Path(folder))}
    except subprocess.CalledProcessError:
        pytest.skip("The package index cannot be reached.")


def first_of_formats(templates: dict[str, str]) -> dict[str, str]:
    """Return the name of a template of each format of calls."""
    formats = {name: format_name(template) for name, template in templates.items()}
    for part, known in SHOWN.items():
        assert known in {formats[name] for name in formats if part.lower() in name.lower()}
    return {known: name for name, known in sorted(formats.items(), reverse=True) if known}


def names_of_sample(templates: dict[str, str]) -> set[str]:
    """Return the templates of the other tests, whose renderers are there, and some further ones."""
    names = {*first_of_formats(templates).values(), *TEMPLATES_OF_FAMILIES}
    return names.union(sorted(templates.keys() - names)[::8])


@pytest.mark.xdist_group("chat_templates")
def test_a_call_is_the_same_after_render_and_parse(templates: dict[str, str]) -> None:
    """In every format, by the template of a model; whole, in random pieces and by letters."""
    first = first_of_formats(templates)
    read = {
        known: round_trips(name, templates[name], calls_wanted=5) for known, name in first.items()
    }
    assert read.keys() >= {*FORMATS} - WITHOUT_TEMPLATE
    assert not [known for known, calls in read.items() if not calls]


@pytest.mark.xdist_group("chat_templates")
def test_families_call_tools_and_reason_by_their_own_templates(templates: dict[str, str]) -> None:
    """The columns of `docs/models.md`, which `python -m bench.families` fills with more calls."""
    checked = {name: check_chat(name, templates[name], calls=3) for name in TEMPLATES_OF_FAMILIES}
    assert not [problem for one in checked.values() for problem in one.problems]
    cells = {name: (one.tools.split(",")[0], one.reasoning) for name, one in checked.items()}
    assert cells["Qwen3.5-4B"] == ("`qwen3_coder`", "`<think>`, read back")
    assert cells["openai-gpt-oss-120b"] == ("`harmony`", "`<|channel|>`, read back")
    assert cells["microsoft-Phi-3.5-mini-instruct"] == ("none", "none")


@pytest.mark.parametrize("count", [12, pytest.param(5000, marks=pytest.mark.proof)])
@pytest.mark.timeout(7200)
@pytest.mark.xdist_group("chat_templates")
def test_f67_every_template_renders_any_history_with_all_its_words(templates, count) -> None:
    """None is refused, and each text, call and result stands in the prompt, in order.

    A third of the templates has a few histories; the proof is about all of them.
    """
    histories = [random_history(Random(f"history {number}")) for number in range(count)]
    wrong: list[tuple[str, int, str]] = []
    for name in templates if count > 1000 else sorted(names_of_sample(templates)):
        renderer = renderer_of(templates[name], tools_alone="tool_use" in name)
        found = (
            (name, number, fault)
            for number, history in enumerate(histories)
            for fault in faults(history, rendered(renderer, history))
        )
        wrong += islice(found, 3)
    assert not wrong
