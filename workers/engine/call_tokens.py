"""Which special tokens calls of tools are written with: as text they are kept where those are read.

A special token is no text, and is left out of an answer. But some models open a call with one
(Mistral's `[TOOL_CALLS]`), and what reads calls out of a text must find it there.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from mlx_vlm.tools import load_tool_module


def call_tokens(tokenizer: Any, parser_name: str | None) -> dict[int, str]:
    """Return the special tokens that a parser of mlx-vlm looks for, by id.

    Each parser tells what opens and what closes a call. What stands between, such as `[ARGS]`, is
    in its expressions alone, so its source is searched.
    """
    if parser_name is None:
        return {}
    source = inspect.getsource(load_tool_module(parser_name))
    return {
        index: token.content
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and (token.content in source or re.escape(token.content) in source)
    }
