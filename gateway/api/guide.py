"""The guide: the pages of `docs/` in HTML, from a clone or from the wheel.

`mkdocs.yml` has their order. The pages are ours, and no path of a client selects another file.
"""

from __future__ import annotations

import functools
import html
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from markdown_it.token import Token

_GATEWAY = Path(__file__).parents[1]
_COPY = _GATEWAY / "guide"  # in a wheel
_ROOT = _COPY if _COPY.exists() else _GATEWAY.parent
_Entries = Sequence[Mapping[str, Any]]


@functools.cache
def page_names() -> frozenset[str]:
    """Return the paths of the pages below `docs/`."""
    folder = _ROOT / "docs"
    return frozenset(file.relative_to(folder).as_posix() for file in folder.rglob("*.md"))


def contents(url: str, current: str) -> str:
    """Return the links to the API reference at a URL and to all pages below it."""

    def items(entries: _Entries) -> Iterator[str]:
        for entry in entries:
            for title, place in entry.items():
                if not isinstance(place, str):
                    yield f"<li>{html.escape(title)}<ul>{''.join(items(place))}</ul></li>"
                elif not place or place in page_names():
                    path = f"{url}/{place}".rstrip("/")
                    mark = ' aria-current="page"' if place == current else ""
                    yield f'<li><a href="{path}"{mark}>{html.escape(title)}</a></li>'

    entries: _Entries = [{"API reference": ""}, *_navigation()]
    return f'<nav class="contents" aria-label="Documents"><ul>{"".join(items(entries))}</ul></nav>'


@functools.cache
def _navigation() -> _Entries:
    file = _ROOT / "mkdocs.yml"
    entries: _Entries = yaml.safe_load(file.read_text())["nav"] if file.exists() else []
    return entries


@functools.cache
def render(name: str) -> tuple[str, str]:
    """Return the title of a page and its HTML; takes some hundredths of a second."""
    from markdown_it import MarkdownIt  # noqa: PLC0415  # not before someone reads

    parser = MarkdownIt("js-default")
    tokens = parser.parse((_ROOT / "docs" / name).read_text(encoding="utf-8"))
    title = ""
    for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if before.type == "heading_open":
            before.attrSet("id", _anchor(token.content))
            title = title or token.content
        if before.type == "th_open" and not token.content:
            before.tag = after.tag = "td"  # no heading is empty
        before.attrs.pop("style", "")  # of an aligned column, which the policy of pages forbids
        _keep_links(token.children or (), name)
    return title, parser.renderer.render(tokens, parser.options, {})


def _anchor(heading: str) -> str:
    """Return the fragment of a heading, as MkDocs and GitHub name it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _keep_links(tokens: Sequence[Token], name: str) -> None:
    """Leave only the text of pictures, and of links to files that are no pages of the guide."""
    kept = True
    for token in tokens:
        if token.type == "link_open":
            target = str(token.attrs["href"]).partition("#")[0]
            inside = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
            kept = not target or ":" in target or inside in page_names()
        token.hidden = not kept and token.type in ("link_open", "link_close")
        if token.type == "image":
            token.type = "text"
