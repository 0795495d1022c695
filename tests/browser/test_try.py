"""The page on which one tries a model: streams, stop, errors, keys, pictures and hostile text."""

import pytest
from playwright.async_api import expect

from tests.support.browser_tab import BrowserTab
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import DONE, USAGE, Script, ScriptedWorker, chunk, event

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = """\
# Title <img src=x onerror=alert(1)>
Text with **bold**, *soft*, `code <b>` and [a link](https://example.org/a), \
[bad](javascript:alert(1)) <script>alert(1)</script>
1. one
2. two
   - deep

> quote

| a | b |
| - | - |
| 1 | 2 |

```html
<b>not bold</b>
```
end"""
RENDER = """async text => {
  const { MarkdownView } = await import("/pages/try/markdown.js");
  const { TokenSources } = await import("/pages/try/tokens.js");
  const whole = document.createElement("div");
  const grown = document.createElement("div");
  const sources = new TokenSources();
  const sourceOf = index => index % 2 ? "draft" : "model";
  const tokens = text.match(/[^]{1,3}/g).map((text, n) => ({ text, source: sourceOf(n) }));
  sources.add(tokens);
  const view = new MarkdownView(whole, (start, end) => sources.nodes(text, start, end));
  view.update(text);
  let part = "";
  const plain = new MarkdownView(grown, (start, end) => [part.slice(start, end)]);
  for (const token of tokens) plain.update((part += token.text));
  const marks = whole.querySelectorAll(".drafted");
  for (const element of marks) element.replaceWith(element.textContent);
  whole.normalize();
  grown.normalize();
  for (const element of whole.querySelectorAll("button")) element.remove();
  for (const element of grown.querySelectorAll("button")) element.remove();
  return [whole.innerHTML, grown.innerHTML];
}"""


def piece(text: str, source: str, **delta: str) -> bytes:
    choice = {"index": 0, "delta": delta, "token_sources": [{"text": text, "source": source}]}
    return event({"id": "c", "object": "chat.completion.chunk", "choices": [choice]})


async def open_try(tab: BrowserTab, gateway: RunningGateway) -> None:
    """Open the page, and wait until it listens."""
    await tab.open(gateway.url, "/try")
    await expect(tab.page.get_by_label("Model")).to_have_value("demo")
    await expect(tab.page.get_by_label("Question")).to_be_focused()


async def test_reasoning_folds_away_when_the_answer_begins(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker, tab: BrowserTab
) -> None:
    """It is shown as it comes; drafted tokens of the answer are marked where they are."""
    page = tab.page
    thoughts = [piece(one, "draft", reasoning_content=one) for one in ("Hm", "m. ")]
    texts = [piece("Yes", "model", content="Yes"), piece(" sir", "draft", content=" sir")]
    usage = USAGE | {"completion_tokens": 21}
    timed = {"choices": [], "usage": usage, "metrics": {"mean_itl_ms": 2}}
    end = (chunk({}, "stop"), event(timed), DONE)
    module_worker.script = Script(events=(*thoughts, *texts, *end), hang_after=2)
    await open_try(tab, shared_gateway)
    await page.get_by_label("Reasoning effort").select_option("high")
    await page.get_by_label("Question").fill("Hello")
    await page.keyboard.press("Enter")
    answer = page.get_by_role("article", name="Answer of demo")
    await expect(page.get_by_role("region", name="Code for curl")).to_contain_text("_effort")
    thinking = answer.locator("details")
    await expect(thinking.locator("p")).to_have_text("Hmm. ")
    await expect(thinking).to_have_attribute("open", "")
    module_worker.resume.set()
    await expect(answer.locator(".content")).to_have_text("Yes sir")
    await expect(answer.locator(".content .drafted")).to_have_text(" sir")
    await expect(answer.locator(".facts")).to_contain_text("500 tokens/s")
    await expect(thinking).not_to_have_attribute("open", "")
    await thinking.locator("summary").click()
    await expect(thinking.locator("p")).to_be_visible()
    assert module_worker.requests[-1].body["reasoning_effort"] == "high"


async def test_a_conversation_streams_stops_fails_and_is_asked_again(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker, tab: BrowserTab
) -> None:
    page = tab.page
    await open_try(tab, shared_gateway)
    await page.get_by_label("System prompt").fill("Be kind.")
    await page.get_by_label("Longest answer").fill("50")
    await page.get_by_label("Question").fill("Hello")
    await page.keyboard.press("Enter")
    answers = page.get_by_role("article", name="Answer of demo")
    await expect(answers.first.locator(".facts")).to_contain_text("It ran on fake-a")
    await expect(answers.first.locator(".facts")).to_contain_text("too short to measure the speed")
    code = page.get_by_role("region", name="Code for curl")
    for part in ('"temperature":0,"max_tokens":50', "Be kind.", "Hello"):
        await expect(code).to_contain_text(part)

    module_worker.script = Script(hang_after=1)
    await page.get_by_label("Question").fill("Again")
    await tab.button("Send").click()
    await expect(tab.button("Stop")).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(answers.nth(1)).to_contain_text("topped")
    await expect(tab.button("Send")).to_be_visible()

    module_worker.script = Script(status=500)
    await page.get_by_label("Question").fill("Fail")
    await page.keyboard.press("Enter")
    await expect(answers.nth(2).get_by_role("alert")).to_be_visible()
    module_worker.script = Script()
    await tab.button("Try again").click()
    await expect(answers.nth(2).locator(".facts")).to_contain_text("It ran on fake-a")
    await tab.button("New chat").click()
    await expect(answers).to_have_count(0)


async def test_a_key_is_asked_for_and_pictures_are_bounded(gateway_with_worker, tab) -> None:
    page = tab.page
    secret = gateway_with_worker.create_key()["secret"]
    await tab.open(gateway_with_worker.url, "/try")
    await page.get_by_label("Your key").fill(secret)
    await page.keyboard.press("Enter")
    await expect(page.get_by_label("Model")).to_have_value("demo")
    assert secret not in await page.content()
    # One paste and one drop at once, which are read later.
    await page.evaluate(
        """() => {
          const data = new DataTransfer();
          for (let count = 0; count < 5; count += 1) {
            data.items.add(new File(["x"], "x.png", { type: "image/png" }));
          }
          const settings = { clipboardData: data, dataTransfer: data, cancelable: true };
          const question = document.getElementById("question");
          question.dispatchEvent(new ClipboardEvent("paste", settings));
          document.dispatchEvent(new DragEvent("drop", { ...settings, bubbles: true }));
        }"""
    )
    await expect(page.locator(".picture")).to_have_count(8)
    await tab.button("Remove x.png").first.click()
    await expect(page.locator(".picture")).to_have_count(7)


async def test_markdown_becomes_elements_and_hostile_text_stays_text(shared_gateway, tab) -> None:
    page = tab.page
    await open_try(tab, shared_gateway)
    whole, grown = await page.evaluate(RENDER, HOSTILE)
    assert whole == grown, "an answer looks the same, however it arrived"
    assert "<h3>Title &lt;img src=x onerror=alert(1)&gt;</h3>" in whole
    for part in (
        *("<strong>bold</strong>", "<em>soft</em>", "<code>code &lt;b&gt;</code>"),
        *('href="https://example.org/a"', "[bad](javascript:alert(1)) &lt;script&gt;"),
        *('<ol start="1"><li>one</li><li>two<ul><li>deep</li></ul></li></ol>', "<blockquote>"),
        *("<td>2</td>", "&lt;b&gt;not bold&lt;/b&gt;</code>", "<p>end</p>"),
    ):
        assert part in whole, part
    assert whole.count("<a ") == 1


async def test_l15_no_text_takes_more_than_linear_time(gateway_with_worker, tab) -> None:
    """With a cube, or a square, of its length the browser would not answer within its timeout."""
    render = """async text => {
      const { MarkdownView } = await import("/pages/try/markdown.js");
      const whole = document.createElement("div");
      new MarkdownView(whole, (start, end) => [text.slice(start, end)]).update(text);
      return whole.textContent.length;
    }"""
    await open_try(tab, gateway_with_worker)
    marks = ("`", "`` ", "`a", "[", "[a](http://x", "**a ", "*a ", "_a ", "http://....", "`*_[")
    for mark in marks:
        assert await tab.page.evaluate(render, ("a" + mark * 20_000)[:19_999]), mark
    for line in ("~" * 400_000 + "`", "`" * 400_000 + "a`", "x|\n" + " " * 400_000):
        assert await tab.page.evaluate(render, line), line[:3]
    suggest = """async before => {
      const { PolicySchema } = await import("/pages/admin/policy_schema.js");
      return new PolicySchema({ properties: {} }).suggest(before, before).options.length;
    }"""
    assert await tab.page.evaluate(suggest, " " + "- " * 200_000 + "\u2028") == 0
