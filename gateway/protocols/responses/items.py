"""Items as they are kept, and as the lists of OpenAI show them."""

from collections.abc import Mapping
from typing import Any

from gateway.types import Json

OUTPUTS = frozenset(("function_call_output", "custom_tool_call_output"))
_WITH_STATUS = OUTPUTS | set(
    "message reasoning function_call tool_search_call tool_search_output".split()
)
ITEMS = {
    "message": ("msg", "role content phase".split()),
    "reasoning": ("rs", "summary content encrypted_content".split()),
    "function_call": ("fc", "call_id namespace name arguments".split()),
    "custom_tool_call": ("ctc", "call_id namespace name input".split()),
    "tool_search_call": ("tsc", "call_id execution arguments".split()),
    "tool_search_output": ("tso", "call_id execution tools".split()),
    "function_call_output": ("fco", "call_id output".split()),
    "custom_tool_call_output": ("cto", "call_id output".split()),
}
"""By type, how ids begin, and the fields that the gateway reads, beside those of all."""
_OTHER = ("item", ["call_id"])
_PART_FIELDS = frozenset(
    "type text refusal annotations logprobs image_url detail file_data filename file_id".split()
)


def kept_item(item: Mapping[str, Any], place: str) -> Json:
    """Return an item without the fields that nothing reads, and with an id for its place."""
    prefix, fields = ITEMS.get(item["type"], _OTHER)
    known: Json = {"id": f"{prefix}_{place}"}
    known |= {name: item[name] for name in ("type", "status", *fields) if name in item}
    for name in ("content", "output", "summary"):
        if isinstance(parts := known.get(name), list):
            known[name] = [_known_part(part) for part in parts]
    return known


def _known_part(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return None if isinstance(part, list) else part
    return {name: value for name, value in part.items() if name in _PART_FIELDS}


def shown_item(item: Mapping[str, Any], *, encrypted: bool) -> Json:
    """Return an item with all that its type requires; `encrypted`: also the sealed reasoning."""
    shown: Json = dict(item)
    kind = shown["type"]
    if kind in _WITH_STATUS:
        shown["status"] = shown.get("status") or "completed"
    field = "output" if kind in OUTPUTS else "content"
    if kind == "message" or (kind in OUTPUTS and isinstance(shown[field], list)):
        shown[field] = _shown_parts(shown[field], by_user=shown.get("role") != "assistant")
    if kind == "reasoning":
        shown["summary"] = shown.get("summary") or []
        if not encrypted:
            shown.pop("encrypted_content", None)
    return shown


def _shown_parts(content: Any, *, by_user: bool) -> list[Json]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [_shown_part(part, by_user=by_user) for part in parts]


def _shown_part(part: Mapping[str, Any], *, by_user: bool) -> Json:
    if part["type"] in ("text", "input_text", "output_text"):
        if by_user:
            return {"type": "input_text", "text": part["text"]}
        return {"annotations": [], "logprobs": [], **part, "type": "output_text"}
    if part["type"] == "input_image":
        return {"file_id": None, "detail": "auto", **part}
    return dict(part)
