"""axe-core on a page in a browser."""

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page

# Without `preload`, which fetches style sheets again: the policy of the API reference forbids it.
_OPTIONS = {"preload": False, "resultTypes": ["violations"]}


async def accessibility_problems(page: Page) -> list[str]:
    """Return what axe finds on a page as it is shown: each rule that an element violates."""
    results = await Axe().run(page, options=_OPTIONS)
    return [
        f"{violation['id']}: {node['html'][:100]}"
        for violation in results.response["violations"]
        for node in violation["nodes"]
    ]
