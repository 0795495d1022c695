"""Prompts of a load test: sampled evenly and reproducibly, and read strictly."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from gateway.loadgen import MeasurementError
from gateway.loadgen.prompts import Prompt, built_in_prompts, read_prompts, sample_prompts


def test_a_seed_determines_the_sampled_prompts() -> None:
    prompts = built_in_prompts()
    assert sample_prompts(prompts, 50, Random(7)) == sample_prompts(prompts, 50, Random(7))
    assert sample_prompts(prompts, 50, Random(7)) != sample_prompts(prompts, 50, Random(8))


def test_no_prompt_repeats_before_all_prompts_were_drawn() -> None:
    prompts = [Prompt(({"role": "user", "content": str(number)},)) for number in range(10)]
    sampled = sample_prompts(prompts, 35, Random(1))
    counts = Counter(prompt.messages[0]["content"] for prompt in sampled)
    assert sorted(counts.values()) == [3] * 5 + [4] * 5


def test_lines_are_prompts_or_conversations(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "Hi", "max_tokens": 5}\n\n{"messages": [{"role": "user", "content": "Ho"}]}\n'
    )
    assert read_prompts(file) == (
        Prompt(({"role": "user", "content": "Hi"},), 5),
        Prompt(({"role": "user", "content": "Ho"},)),
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "does not contain any prompts"),
        ("Hi", ":1: not a JSON object"),
        ('["Hi"]', ":1: not a JSON object"),
        ('{"prompt": "Hi"}\n{}', ":2: must contain a 'prompt'"),
        ('{"prompt": "Hi", "messages": [{}]}', ":1: must contain a 'prompt'"),
        ('{"messages": []}', ":1: must contain a 'prompt'"),
        ('{"messages": ["Hi"]}', ":1: must contain a 'prompt'"),
        ('{"prompt": "Hi", "max_tokens": 0}', ":1: 'max_tokens' must be a whole number"),
        ('{"prompt": "Hi", "max_tokens": true}', ":1: 'max_tokens' must be a whole number"),
        ('{"prompt": "Hi", "temperature": 1}', ":1: unknown field 'temperature'"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"{line}\n")
    with pytest.raises(MeasurementError, match=f"{file}.*{sentence}"):
        read_prompts(file)
