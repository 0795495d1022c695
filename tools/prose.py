"""Measure the prose of README and docs: free relatives per 1,000 words, at most 8 on a page.

A sentence such as "Who stands in line stays there" has no named actor. Pages that read as if
translated begin 15 to 39 clauses per 1,000 words with who, what, where or those; httpx, starlette
and svcs 0 to 5. `python -m tools.prose` exits with 1 if a page is above the ceiling.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CEILING = 8.0
_ROOT = Path(__file__).parents[1]
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_MARKUP = re.compile(r"`[^`]*`|<[^>]+>|\]\([^)]*\)")
_CLAUSE_INITIAL = re.compile(
    r"(?:^\s*(?:[-*#>|]+|\d+\.)?\s*|[.;:,!?(|]\s+)(?:and |but |or )?"
    r"(?:who|whoever|whom|whose|what|whatever|where|those)\b",
    re.IGNORECASE | re.MULTILINE,
)


def rate(text: str) -> float:
    """Return the clause-initial who, what, where and those per 1,000 words of a Markdown page."""
    prose = _MARKUP.sub("x", _CODE.sub("", text))
    words = len(re.findall(r"[A-Za-z']+", prose))
    # Join the lines of a paragraph: a clause may begin after a line break.
    flowed = re.sub(r"(?<!\n)\n(?![\n\-*#>|\d])", " ", prose)
    return 1000 * len(_CLAUSE_INITIAL.findall(flowed)) / max(words, 1)


def main() -> int:
    """Print the rate of each page; return 1 if one is above the ceiling."""
    pages = [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *sorted(_ROOT.glob("docs/**/*.md"))]
    above = 0
    for page in pages:
        page_rate = rate(page.read_text())
        above += page_rate > CEILING
        mark = "above" if page_rate > CEILING else ""
        sys.stdout.write(f"{page_rate:6.1f}  {page.relative_to(_ROOT)}  {mark}\n")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
