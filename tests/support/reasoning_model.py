"""The demo checkpoint with the marks of a family, and a template that opens or closes reasoning."""

from pathlib import Path

from workers.demo import CHECKPOINT

THINK_END = 1535
"""The token `</think>`."""
_THINK = {"<think>": "<think>", "</think>": "</think>"}
_FAMILIES: dict[str, tuple[dict[str, str], str, str]] = {
    "qwen": (_THINK, "<think>\\n", "<think>\\n\\n</think>\\n\\n"),
    "mistral": ({"<think>": "[THINK]", "</think>": "[/THINK]"}, "[THINK]", "[THINK][/THINK]"),
    "gemma": (
        {"<think>": "<|channel>", "</think>": "<channel|>"},
        "<|channel>thought\\n",
        "<|channel>thought\\n<channel|>",
    ),
    "gpt-oss": (
        {
            "<tool_call>": "<|start|>",
            "</tool_call>": "<|channel|>",
            "<tool_response>": "<|message|>",
            "</tool_response>": "<|end|>",
        },
        "<|start|>assistant<|channel|>analysis<|message|>",
        "<|start|>assistant<|channel|>final<|message|>",
    ),
}
"""Tokens of the demo model and what replaces them, and the ends of prompts."""
FAMILIES = tuple(_FAMILIES)


def make_reasoning_model(folder: Path, family: str = "qwen") -> Path:
    """Fill a folder with the demo checkpoint and another generation prompt; return it."""
    marks, opened, closed = _FAMILIES[family]
    folder.mkdir()
    for path in CHECKPOINT.iterdir():
        (folder / path.name).symlink_to(path)
    tail = f"{{%- if enable_thinking -%}}{{{{- '{opened}' -}}}}"
    tail += f"{{%- else -%}}{{{{- '{closed}' -}}}}{{%- endif -%}}"
    for name, end in (("chat_template.jinja", tail), ("tokenizer.json", "")):
        text = (folder / name).read_text()
        (folder / name).unlink()
        for old, new in marks.items():
            text = text.replace(old, new)
        (folder / name).write_text(text + end)
    return folder
