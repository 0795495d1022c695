"""The demo checkpoint with a chat template that opens or closes a block of reasoning."""

from __future__ import annotations

from pathlib import Path

from workers.demo import CHECKPOINT

THINK_END = 1535
"""The token `</think>`."""
_TAIL = """\
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- else -%}
{{- '<think>\\n' -}}
{%- endif -%}
"""


def make_reasoning_model(folder: Path) -> Path:
    """Fill a folder with the demo checkpoint and Qwen's generation prompt; return it."""
    folder.mkdir()
    for path in CHECKPOINT.iterdir():
        (folder / path.name).symlink_to(path)
    template = folder / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    template.write_text(text + _TAIL)
    return folder
