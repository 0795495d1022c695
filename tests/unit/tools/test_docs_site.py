"""The site of the pages: links to files outside of docs/."""

import logging
from types import SimpleNamespace

import pytest

from tools.docs_site import on_page_markdown


@pytest.fixture
def render(tmp_path):
    for name in ("docs/reference", "bench"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "bench/a.md").touch()
    path = "reference/page.md"
    file = SimpleNamespace(src_path=path, abs_src_path=str(tmp_path / "docs" / path))
    config = SimpleNamespace(docs_dir=str(tmp_path / "docs"))
    return lambda text: on_page_markdown(text, page=SimpleNamespace(file=file), config=config)


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("[a](../../bench/a.md#part)", "a"),
        ("[a](../other.md#part)", "[a](../other.md#part)"),
        ("[a](other.md)", "[a](other.md)"),
        ("![a](../other.svg)", "![a](../other.svg)"),
    ],
)
def test_only_a_link_to_a_file_outside_of_the_pages_becomes_text(
    render, caplog, link, shown
) -> None:
    assert render(f"See {link}.") == f"See {shown}."
    assert caplog.records == []


def test_a_link_to_a_file_that_does_not_exist_is_a_warning_which_fails_the_build(
    render, caplog
) -> None:
    caplog.set_level(logging.WARNING)
    render("[a](../../bench/b.md)")
    assert "reference/page.md links to ../../bench/b.md, which does not exist" in caplog.text
