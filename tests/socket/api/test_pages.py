"""The start page for browsers and for other clients, and the navigation of each port."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import httpx
from pydantic import SecretStr

from tests.support.running_gateway import RunningGateway, make_settings

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
MAIN_LINKS = ["/", "/dashboard", "/try", "/#models"]
ADMIN_LINKS = ["/admin#workers", "/admin#keys", "/admin#policy"]
DOCS_LINK = "/docs"


def links_of(page: httpx.Response) -> list[str]:
    """Return the targets of the navigation of a page."""
    head = page.text.partition("<main")[0].partition('<div class="top-inside">')[2]
    return re.findall(r'<a [^>]*?href="([^"]+)"', head)


def test_the_printed_address_is_a_page_for_browsers_and_names_the_pages_for_others(
    gateway: RunningGateway,
) -> None:
    page = gateway.client.get("/", headers=BROWSER)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    told = gateway.client.get("/")
    assert told.json() == {
        "name": "Paceline",
        "version": version("paceline"),
        "base_path": "/v1",
        "key_required": False,
        "openapi": "/openapi.json",
        "pages": ["/", "/dashboard", "/try", "/docs", "/admin"],
    }
    assert page.headers["vary"] == told.headers["vary"] == "accept"
    for path in told.json()["pages"]:
        assert gateway.client.get(path, headers=BROWSER).status_code == 200, path
    icon = gateway.client.get("/favicon.ico")
    assert icon.headers["content-type"] == "image/vnd.microsoft.icon"
    gateway.create_key()
    assert httpx.get(f"{gateway.url}/", timeout=60).json()["key_required"] is True


def test_every_page_links_to_all_pages_of_its_port(gateway: RunningGateway, tmp_path: Path) -> None:
    everywhere = [*MAIN_LINKS, *ADMIN_LINKS, DOCS_LINK]
    for path in gateway.client.get("/").json()["pages"]:
        page = gateway.client.get(path, headers=BROWSER)
        assert links_of(page) == everywhere
        assert f'<span class="version">{version("paceline")}</span>' in page.text
    settings = make_settings(tmp_path / "split", admin_port=0, admin_key=SecretStr("admin-key"))
    with RunningGateway(settings) as split:
        for path in split.client.get("/").json()["pages"]:
            assert links_of(split.client.get(path, headers=BROWSER)) == [*MAIN_LINKS, DOCS_LINK]
        for path in ("/admin", "/docs"):
            assert links_of(split.admin.get(path)) == ["/admin", *ADMIN_LINKS, DOCS_LINK]
