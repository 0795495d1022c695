"""Variants of the demo checkpoint with hostile files, as a hypothesis strategy.

Each variant replaces a few values, or damages a few bytes, of the files that a loader reads.
"""

import json
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from workers.demo import CHECKPOINT

JSON_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
WEIGHT_FILES = ("model.safetensors", "model-mtp.safetensors")
VALUES: tuple[Any, ...] = (
    *(None, True, False, "", [], {}, [[]], {"": None}, "\x00", "\x1b[2J", "../../etc/passwd"),
    *(-1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, 10**30, -(2**31), -(2**63)),
    *(0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")),
    *("x" * 100_000, [0] * 10_000, ["a"] * 1000, list(range(100)), {"a": {"b": {"c": []}}}),
)
ADDED: tuple[tuple[str, Any], ...] = (
    ("auto_map", {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.T", None]}),
    ("auto_map", {"AutoProcessor": "someone/else--evil.Processor"}),
    ("quantization", {"group_size": 64, "bits": 4}),
    ("quantization", {"group_size": 0, "bits": 99, "mode": "none"}),
    ("quantization_config", {"quant_method": "fp8"}),
    ("vision_config", None),
    ("text_config", []),
    ("dflash_config", {"projector_type": 1}),
    ("architectures", ["BoundaryExtractor"]),
    ("model_type", "got"),
    ("model_type", "../../demo"),
    ("model_type", "gemma3"),
    ("tokenizer_class", "NoSuchTokenizer"),
    ("tokenizer_class", "LlamaTokenizer"),
    ("processor_class", "AutoModel"),
    ("image_processor_type", "NoSuchProcessor"),
    ("eos_token_id", [-1, 10**30, None, "x"]),
    ("max_new_tokens", -5),
)
TEMPLATES = (
    "{{ 1 / 0 }}",
    "{% for",
    "{{ missing.attribute.of.nothing }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception('no') }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'x' * 1000 }}",
    "{% include 'other' %}",
    "",
    "\ud7ff\u0000",
)


@dataclass(frozen=True, slots=True)
class HostileCheckpoint:
    """Contents that replace files of the demo checkpoint; shown by what was changed."""

    changes: tuple[str, ...]
    files: dict[str, bytes]

    def __repr__(self) -> str:
        return f"HostileCheckpoint({'; '.join(self.changes)})"

    def write(self, folder: Path) -> None:
        folder.mkdir()
        for file in CHECKPOINT.iterdir():
            if file.name not in self.files:
                (folder / file.name).symlink_to(file)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


@st.composite
def hostile_checkpoints(draw: st.DrawFn) -> HostileCheckpoint:
    """Return a demo checkpoint with one to three hostile changes."""
    files: dict[str, bytes] = {}
    changes = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from((*JSON_FILES, *WEIGHT_FILES, "config.json", "template")))
        if name == "template":
            name = "chat_template.jinja"
            change = draw(st.sampled_from(TEMPLATES))
            files[name] = change.encode()
        else:
            content = files.get(name) or (CHECKPOINT / name).read_bytes()
            if draw(st.integers(0, 7)) == 7:
                files[name], change = draw(damaged_bytes(content))
            elif name in WEIGHT_FILES:
                files[name], change = draw(damaged_header(content))
            else:
                files[name], change = draw(damaged_json(content))
        changes.append(f"{name}: {change}")
    return HostileCheckpoint(tuple(changes), files)


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> tuple[bytes, str]:
    """Truncate, overwrite or extend a file."""
    at = draw(st.integers(0, max(0, len(content) - 1)))
    kind = draw(st.sampled_from(("truncated", "overwritten", "extended", "nested", "noise")))
    if kind == "truncated":
        damaged = content[:at]
    elif kind == "overwritten":
        damaged = content[:at] + draw(st.binary(min_size=1, max_size=16)) + content[at + 16 :]
    elif kind == "extended":
        damaged = content + draw(st.binary(min_size=1, max_size=64))
    elif kind == "nested":
        damaged = b"[" * 100_000 + content
    else:
        damaged = random.Random(at).randbytes(min(len(content), 4096))
    return damaged, f"{kind} at {at}"


@st.composite
def damaged_json(draw: st.DrawFn, content: bytes) -> tuple[bytes, str]:
    """Replace, delete or add a value somewhere in a JSON file."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return content, "unchanged, since it is damaged"
    change = draw(_damaged_value(document))
    return json.dumps(document).encode(), change


@st.composite
def damaged_header(draw: st.DrawFn, content: bytes) -> tuple[bytes, str]:
    """Damage the header of a safetensors file: its length, or a value in it."""
    if draw(st.booleans()):
        length = draw(st.sampled_from((0, 1, 7, len(content), 2**31, 2**32, 2**63, 2**64 - 1)))
        return struct.pack("<Q", length) + content[8:], f"header of {length} bytes"
    size = struct.unpack("<Q", content[:8].ljust(8, b"\0"))[0]
    try:
        header = json.loads(content[8 : 8 + min(size, len(content))])
    except (ValueError, RecursionError):
        return content, "unchanged, since it is damaged"
    change = draw(_damaged_value(header))
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    data = content[8 + size :]
    return struct.pack("<Q", len(encoded)) + encoded + data, change


@st.composite
def _damaged_value(draw: st.DrawFn, document: Any) -> str:
    """Change one value of a document in place."""
    if not isinstance(document, dict | list) or not document:
        return "unchanged, since it is a bare value"
    parent, path = document, ""
    while True:
        keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        key = draw(st.sampled_from(keys))
        path += f"/{key}"
        child = parent[key]
        if not isinstance(child, dict | list) or not child or draw(st.integers(0, 2)) == 0:
            break
        parent = child
    kind = draw(st.sampled_from(("replace", "replace", "replace", "delete", "add")))
    if kind == "delete":
        del parent[key]
        return f"{path} deleted"
    if kind == "add" and isinstance(document, dict):
        name, value = draw(st.sampled_from(ADDED))
        document[name] = value
        return f"{name} = {value!r}"
    value = draw(st.sampled_from(VALUES) | st.integers() | st.floats() | st.text(max_size=20))
    parent[key] = value
    return f"{path} = {repr(value)[:60]}"
