"""The files of the pages for people, as they lie in the repository."""

from __future__ import annotations

from pathlib import Path

PAGES = Path(__file__).parents[2] / "gateway" / "pages"
FOLDERS = {"admin": ("admin", "shared"), "dashboard": ("dashboard", "shared", "vendor/uplot")}
"""By page; what pages share lies beside each."""


def page_files(page: str) -> list[Path]:
    """List all that a page loads."""
    return [file for folder in FOLDERS[page] for file in (PAGES / folder).iterdir()]
