"""A hook of MkDocs: a link to a file outside of docs/ must exist, and becomes text on the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.plugins import get_plugin_logger

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)]*)\)")
log = get_plugin_logger("docs_site")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return a page without its links to files outside of docs/."""
    docs, file = Path(config.docs_dir), Path(page.file.abs_src_path)

    def text_of(link: re.Match[str]) -> str:
        target = (file.parent / urlsplit(link[2]).path).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not target.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_path, link[2])
        return link[1]

    return _LINK.sub(text_of, markdown)
