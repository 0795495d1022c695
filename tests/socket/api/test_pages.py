"""The pages: the printed address, the navigation of each port, security headers and inline code."""

import re
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

from paceline.request.profile import Bypass
from tests.support.running_gateway import RunningGateway, make_settings

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
MAIN_LINKS = ["/", "/dashboard", "/try", "/#models"]
ADMIN_LINKS = ["/admin#workers", "/admin#keys", "/admin#policy"]
DOCS_LINK = "/docs"
PATHS = ["/", "/dashboard", "/try", "/docs", "/admin"]
PAGES = Path(__file__).parents[3] / "gateway" / "pages"


def page_files() -> list[Path]:
    """List the files of the pages: texts, scripts, styles and icons."""
    kinds = (".html", ".js", ".css", ".svg")
    return [file for file in PAGES.rglob("*") if file.suffix in kinds]


def links_of(page: httpx.Response) -> list[str]:
    head = page.text.partition("<main")[0].partition('<div class="top-inside">')[2]
    return re.findall(r'<a [^>]*?href="([^"]+)"', head)


def test_the_printed_address_is_a_page_for_browsers_and_names_the_pages_for_others(gateway) -> None:
    page = gateway.client.get("/", headers=BROWSER)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    told = gateway.client.get("/")
    assert told.json() == {
        "name": "Paceline",
        "version": version("paceline"),
        "base_path": "/v1",
        "key_required": False,
        "openapi": "/openapi.json",
        "pages": PATHS,
    }
    assert page.headers["vary"] == told.headers["vary"] == "accept"
    for path in PATHS:
        page = gateway.client.get(path, headers=BROWSER)
        assert links_of(page) == [*MAIN_LINKS, *ADMIN_LINKS, DOCS_LINK]
        assert f'<span class="version">{version("paceline")}</span>' in page.text
    icon = gateway.client.get("/favicon.ico")
    assert icon.headers["content-type"] == "image/vnd.microsoft.icon"
    gateway.create_key()
    assert gateway.client.get("/").json()["key_required"] is True


def test_the_pages_of_an_admin_port_and_those_of_clients_do_not_link_to_each_other(
    tmp_path: Path,
) -> None:
    with RunningGateway(make_settings(tmp_path, admin_port=0)) as split:
        for path in split.client.get("/").json()["pages"]:
            assert links_of(split.client.get(path, headers=BROWSER)) == [*MAIN_LINKS, DOCS_LINK]
        for path in ("/admin", "/docs"):
            assert links_of(split.admin.get(path)) == ["/admin", *ADMIN_LINKS, DOCS_LINK]


def test_every_page_and_file_has_security_headers_and_an_etag(module_gateway) -> None:
    files = [f"/pages/{file.relative_to(PAGES)}" for file in page_files() if file.suffix != ".html"]
    assert len(files) > 50
    for path in (*PATHS, "/favicon.ico", *files):
        response = module_gateway.client.get(path, headers=BROWSER)
        assert response.status_code == 200, path
        # The script of the API reference is another party's: a sandbox keeps it from keys and
        # network.
        own = "sandbox allow-scripts" if path == "/docs" else "connect-src 'self'"
        directives = response.headers["content-security-policy"].split("; ")
        assert {
            *("default-src 'none'", "script-src 'self'", "style-src 'self'", own),
            *("frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"),
        } <= {*directives}
        assert sum(one.startswith("connect-src") for one in directives) == (path != "/docs")
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        if path != "/docs":  # it contains the description of the routes
            known = {**BROWSER, "if-none-match": response.headers["etag"]}
            cached = module_gateway.client.get(path, headers=known)
            assert (cached.status_code, cached.content) == (304, b"")


def test_each_page_of_the_guide_is_under_docs_and_links_only_to_what_is_there(
    module_gateway,
) -> None:
    read = module_gateway.client.get
    docs = Path(__file__).parents[3] / "docs"
    names = {file.relative_to(docs).as_posix() for file in docs.rglob("*.md")}
    reference = read(DOCS_LINK).text.partition("<article>")[0]
    assert {*re.findall(r'href="/docs/([^"]+)"', reference)} == names
    for name in names:
        page = read(f"/docs/{name}").text
        assert page.count("<h1") == 1
        assert "style=" not in page
        article = page.partition("<article>")[2]
        for link in re.findall(r'href="(?!https?:)([^"]+)"', article):
            target = read(httpx.URL(f"/docs/{name}").join(link).path).text
            fragment = link.partition("#")[2]
            assert not fragment or f'id="{fragment}"' in target, f"{name}: {link}"


@pytest.mark.parametrize(
    "path",
    [
        *("start/index.html", "layout.html", "vendor/README.md", "shared", "", "shared/"),
        *("../api/pages.py", "..%2fapi%2fpages.py", "/etc/passwd", "shared/../layout.html"),
    ],
)
def test_no_path_selects_another_file(module_gateway, path: str) -> None:
    url = httpx.URL(module_gateway.url).copy_with(raw_path=b"/pages/" + path.encode())
    for place in (url, url.copy_with(raw_path=b"/docs/" + path.encode())):
        refused = httpx.get(place, timeout=60)
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "path_not_found"


def test_pages_contain_no_other_origin_and_no_inline_code() -> None:
    for file in page_files():
        if file.parent.parent.name == "vendor":
            continue  # libraries of others, which the tests in the browser cover
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search("://|innerHTML", text), file
        if file.suffix == ".html":
            assert not re.search("style=|<style", text), file
            own = r'<script ((type="module" )?src="/|id="openapi" type="application/json")'
            assert text.count("<script") == len(re.findall(own, text)), file


def test_each_bypass_reason_has_a_description() -> None:
    text = (PAGES / "shared" / "bypass_reasons.js").read_text()
    for reason in Bypass:
        assert text.count(f'\n  {reason.value}: "') == 2, f"a name and a sentence: {reason}"
