"""A browser tab that records errors of a page."""

from urllib.parse import urlsplit

from playwright.async_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Locator,
    Page,
    Request,
)

from tests.support.running_gateway import RunningGateway

# The console reports each error response; the tests check the message on the page instead.
# An open page asks the gateway again every few seconds; in a test five times as often.
_OFTEN = """{
  const every = window.setInterval;
  window.setInterval = (call, pause, ...more) => every(call, pause / 5, ...more);
}"""
_REFUSED = "Failed to load resource: the server responded with a status of "


async def open_context(browser: Browser) -> BrowserContext:
    """Return a context for tabs without motion: a colour that still changes has no contrast."""
    context = await browser.new_context(
        viewport={"width": 1280, "height": 800}, reduced_motion="reduce"
    )
    context.set_default_timeout(60_000)
    await context.add_init_script(_OFTEN)
    return context


class BrowserTab:
    """A browser tab with its requests and errors, and shortcuts for actions of a user."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requested_urls: list[str] = []
        """Every URL that the page requested."""
        self._origin = ""
        page.on("request", self._record_request)
        page.on("console", self._record_message)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", self._accept_dialog)

    async def open_admin(self, gateway: RunningGateway, section: str = "") -> None:
        """Open the page for admins by the link that a gateway prints on a terminal."""
        await self.open(gateway.url, f"/admin#admin-key={gateway.admin_key}")
        if section:
            await self.open(gateway.url, f"/admin{section}")

    async def open(self, url: str, path: str) -> None:
        parts = urlsplit(url)
        self._origin = f"{parts.scheme}://{parts.netloc}"
        await self.page.goto(url + path)

    async def fill_policy(self, text: str) -> None:
        await self.page.get_by_label("Document").fill(text)

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def _record_request(self, request: Request) -> None:
        self.requested_urls.append(request.url)
        if not request.url.startswith((self._origin + "/", "blob:", "data:")):
            self.errors.append(f"left its origin: {request.url}")

    def _record_message(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"} and not message.text.startswith(_REFUSED):
            self.errors.append(message.text)

    @staticmethod
    async def _accept_dialog(dialog: Dialog) -> None:
        await dialog.accept()
