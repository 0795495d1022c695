"""What a person writes is text, also where it spells a control token of the model.

A tokenizer turns `<|im_end|>` into the token that ends a turn wherever it stands: whoever could
write it into a question could write the system message too, and a picture's placeholder without a
picture breaks a model. So such a spelling is parted before the template is rendered, and tokenized
part by part: the model reads the very characters, and no control token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

# A code point that Unicode keeps out of all text for good, so nobody's words hold it.
_PARTING = "\ufdd0"


class ControlTokens:
    """The control tokens of one tokenizer, by their spelling."""

    def __init__(self, spellings: Iterable[str]) -> None:
        known = sorted((spelling for spelling in spellings if len(spelling) > 1), reverse=True)
        self._any = re.compile("|".join(map(re.escape, known)) or "(?!)")

    def part(self, value: Any) -> Any:
        """Return the same texts, mappings and lists with every control token parted in two."""
        if isinstance(value, str):
            return self._any.sub(_parted, value.replace(_PARTING, ""))
        if isinstance(value, Mapping):
            return {self.part(name): self.part(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.part(inner) for inner in value]
        return value


def pieces(text: str) -> list[str]:
    """Return what is to be tokenized one after the other."""
    return text.split(_PARTING)


def _parted(spelled: re.Match[str]) -> str:
    return spelled[0][:1] + _PARTING + spelled[0][1:]
