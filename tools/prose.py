"""Measure the prose of README and docs: each habit of translated English, per 1,000 words.

A sentence such as "Who stands in line stays there" has no named actor. httpx, starlette and svcs
have 0 to 0.7 of each habit, and begin 0 to 5 clauses with who, what, where or those.
`python -m tools.prose` exits with 1 if a page, or a habit over all pages, is above its ceiling.
Docstrings and messages are only measured.
"""

from __future__ import annotations

import re
import sys
from math import inf
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_MARKUP = re.compile(r"`[^`]*`|<[^>]+>|\]\([^)]*\)")
_PAGE_CEILING = 8.0
_CLAUSE_INITIAL = re.compile(
    r"(?:^\s*(?:[-*#>|]+|\d+\.)?\s*|[.;:,!?(|]\s+)(?:and |but |or )?"
    r"(?:who|whoever|whom|whose|what|whatever|where|those)\b",
    re.IGNORECASE | re.MULTILINE,
)
_HABIT_CEILING = 0.5
_HABITS = {
    "tell, told": r"\b(?:tells?|told|telling)\b",
    "alone for only": r"\balone\b",
    "what, those that, one that": r"\bwhat\b|\bthose that\b|\bones? that\b",
    "by which, of which": r"\b(?:by|of|in|from|with|to|for|on) wh(?:ich|om)\b",
    "has no, is none": r"\b(?:has|have|had) (?:no|none)\b|\b(?:is|are) none\b",
}
_DOCSTRING = re.compile(r'^ *"""(.*?)"""', re.MULTILINE | re.DOTALL)
_MESSAGES = ("gateway/errors.py", "paceline/error_messages.py", "gateway/cli/commands.py")


def other_texts() -> dict[str, str]:
    """Return two texts: the docstrings of the product, and its errors, help and pages."""
    packages = ("gateway", "paceline", "policies", "workers")
    files = [file for name in packages for file in (_ROOT / name).rglob("*.py")]
    docstrings = [text for file in files for text in _DOCSTRING.findall(file.read_text())]
    messages = [page.read_text() for page in _ROOT.glob("gateway/pages/*/*.html")]
    for name in _MESSAGES:
        messages += re.findall(r'"([^"\n]+)"', _DOCSTRING.sub("", (_ROOT / name).read_text()))
    return {"docstrings": "\n\n".join(docstrings), "messages": "\n\n".join(messages)}


def rate(page: str, habit: re.Pattern[str] = _CLAUSE_INITIAL) -> float:
    """Return how often a Markdown page has a habit, per 1,000 words."""
    prose = _MARKUP.sub("x", _CODE.sub("", page))
    words = len(re.findall(r"[A-Za-z']+", prose))
    # Join the lines of a paragraph: a clause may begin after a line break.
    flowed = re.sub(r"(?<!\n)\n(?![\n\-*#>|\d])", " ", prose)
    return 1000 * len(habit.findall(flowed)) / max(words, 1)


def main() -> int:
    """Print the rates; return 1 if one is above its ceiling."""
    pages = [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *sorted(_ROOT.glob("docs/**/*.md"))]
    texts = {str(page.relative_to(_ROOT)): page.read_text() for page in pages}
    everything = "\n\n".join(texts.values())
    others = other_texts()
    rates = [(name, rate(text), _PAGE_CEILING) for name, text in texts.items()]
    for name, habit in _HABITS.items():
        pattern = re.compile(habit, re.IGNORECASE)
        rates.append((name, rate(everything, pattern), _HABIT_CEILING))
        rates += [(f"{name} in {kind}", rate(text, pattern), inf) for kind, text in others.items()]
    for name, measured, ceiling in rates:
        sys.stdout.write(f"{measured:6.2f}  {name}  {'above' if measured > ceiling else ''}\n")
    return 1 if any(measured > ceiling for _, measured, ceiling in rates) else 0


if __name__ == "__main__":
    sys.exit(main())
