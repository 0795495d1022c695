"""The files of the pages in the repository."""

from pathlib import Path

PAGES = Path(__file__).parents[2] / "gateway" / "pages"
FOLDERS = {
    "start": ("start", "shared"),
    "admin": ("admin", "shared"),
    "dashboard": ("dashboard", "shared", "vendor/uplot"),
    "try": ("try", "shared"),
    "docs": ("docs", "shared"),
}
"""Folders by page, including the shared files."""


def page_path(page: str) -> str:
    return "/" if page == "start" else f"/{page}"


def page_files(page: str) -> list[Path]:
    return [file for folder in FOLDERS[page] for file in (PAGES / folder).iterdir()]
