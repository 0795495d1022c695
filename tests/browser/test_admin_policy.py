"""The policy on the page for admins: edit, errors, comparison, activation and rollback."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect

from policies.yaml_io import write_yaml
from tests.support.browser_tab import BrowserTab
from tests.support.policies import PolicyAdmin, single_pool_policy, to_yaml
from tests.support.running_gateway import RunningGateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

ALL_TO_VLM = to_yaml(single_pool_policy("all", lanes=("vlm",)))


async def editor_text(tab: BrowserTab) -> str:
    """Wait for the policy in the editor, and return its text."""
    await expect(tab.page.locator("#active-version")).to_contain_text("is active")
    return await tab.page.get_by_label("Document").input_value()


async def test_an_edit_is_compared_activated_and_rolled_back(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    """What an admin writes about it cannot run a script in the browser of another one."""
    page, gateway = tab.page, gateway_with_worker
    script = "<img src=x onerror=document.title='owned'>"
    pools = [gateway.chat(temperature=0).headers["x-paceline-pool"] for _ in range(3)]
    assert pools == ["text-mtp"] * 3
    await tab.open_admin(gateway)
    await editor_text(tab)

    await tab.fill_policy(ALL_TO_VLM)
    await tab.button("Compare").click()
    difference = page.locator("#difference")
    await expect(difference).to_contain_text(
        "Of the last 3 requests, 3 would be routed differently."
    )
    await expect(difference.locator("tr.goes")).to_have_text(["text-mtpall3"])
    await expect(difference.locator("li.added", has_text="pools.all")).to_be_visible()

    await page.get_by_label("Your name").fill(f"Änne {script}")
    await page.get_by_label("Purpose").fill(f"ünder test {script}")
    await tab.button("Apply as version 2").click()
    await expect(page.locator("#active-version")).to_contain_text(
        f"Version 2 is active · Änne {script}"
    )
    newest = page.locator("#history li").first
    await expect(newest).to_contain_text(f"ünder test {script}")
    assert await page.locator("main img").count() == 0
    assert "owned" not in await page.title()
    assert gateway.chat(temperature=0).headers["x-paceline-pool"] == "all"

    await page.get_by_role("button", name="View version 1", exact=True).click()
    await expect(page.get_by_role("dialog")).to_contain_text("text-mtp")
    await tab.button("Close").click()
    await page.get_by_role("button", name="Roll back to version 1", exact=True).click()
    dialog = page.get_by_role("dialog")
    await expect(dialog.locator("tr.goes")).to_have_text(["alltext-mtp4"])
    await dialog.get_by_label("Purpose").fill("too slow")
    await dialog.get_by_role("button", name="Roll back to version 1").click()
    await expect(page.locator("#active-version")).to_contain_text("Version 3 is active · Änne")
    assert "text-mtp" in await editor_text(tab)
    assert gateway.chat(temperature=0).headers["x-paceline-pool"] == "text-mtp"
    versions = gateway.admin.get("/admin/v1/policy/history").json()["versions"]
    assert [(version["reason"], version["note"]) for version in versions[:2]] == [
        ("rollback", "back to version 1: too slow"),
        ("edit", f"ünder test {script}"),
    ]


async def test_the_edit_of_another_admin_is_loaded_unless_it_conflicts_with_text_in_the_editor(
    gateway_with_worker: RunningGateway, admin: PolicyAdmin, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_admin(gateway_with_worker)
    await editor_text(tab)
    admin.put(single_pool_policy("quick"), x_paceline_author="bob")
    await expect(page.locator("#active-version")).to_contain_text("Version 2 is active · bob")
    assert await editor_text(tab) == write_yaml(single_pool_policy("quick"))
    await tab.fill_policy(ALL_TO_VLM)
    await expect(page.locator("#check")).to_have_text("Valid")
    assert admin.put(single_pool_policy("slow"), x_paceline_author="bob").status_code == 200
    await page.get_by_label("Purpose").fill("second edit")
    # Disabled already if the page has seen the edit of bob by now.
    await page.locator("#apply-button").evaluate("button => button.click()")
    conflict = page.locator("#conflict")
    await expect(conflict).to_contain_text("The policy has changed. Version 3 is active")
    await expect(page.locator("#apply-button")).to_be_disabled()
    await page.get_by_label("Document").press("End")
    await page.get_by_label("Document").type(" ")
    await expect(page.locator("#check")).to_have_text("Valid")
    await expect(page.locator("#apply-button")).to_be_disabled()
    await tab.fill_policy(ALL_TO_VLM)
    assert gateway_with_worker.chat().headers["x-paceline-pool"] == "slow", (
        "the edit of bob is still active"
    )

    await tab.button("Load version 3 (your text stays in this tab)").click()
    editor = page.get_by_label("Document")
    await expect(editor).to_have_value(write_yaml(single_pool_policy("slow")))
    await tab.button("Restore my text").click()
    await expect(page.get_by_label("Document")).to_have_value(ALL_TO_VLM)
    await tab.button("Apply as version 4").click()
    await expect(page.locator("#active-version")).to_contain_text("Version 4 is active")
    assert gateway_with_worker.chat().headers["x-paceline-pool"] == "all"


async def test_the_editor_reports_an_invalid_edit_with_its_line_completes_fields_and_loads_examples(
    module_gateway: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_admin(module_gateway)
    assert "text-mtp" in await editor_text(tab)
    invalid = ALL_TO_VLM.replace("- all", "- fast")
    await tab.fill_policy(invalid)
    problem = page.locator("#problems li")
    await expect(problem).to_contain_text("there is no pool 'fast'")
    await expect(problem).to_contain_text("routes.all.to.#1")
    line = 1 + invalid[: invalid.index("- fast")].count("\n")
    await expect(problem).to_contain_text(f"Line {line}")
    await expect(page.locator("#check")).to_have_text("1 problem")
    await expect(tab.button("Apply")).to_be_disabled()
    await problem.get_by_role("button").click()
    selected = "text => text.value.slice(text.selectionStart, text.selectionEnd)"
    assert await page.get_by_label("Document").evaluate(selected) == "  - fast"
    await tab.fill_policy("a: 1\na: 2\n")
    await expect(problem).to_contain_text("'a' is a duplicate key")
    await tab.fill_policy(ALL_TO_VLM)
    await expect(page.locator("#check")).to_have_text("Valid")
    await expect(problem).to_have_count(0)

    await expect(page.get_by_label("Load an example")).to_contain_text("Teams")
    await tab.fill_policy("version: 1\npools:\n  fast: {lanes: [text-mtp]}\nroutes:\n")
    await page.keyboard.type("- na")
    option = page.locator("#completions:not([hidden]) li")
    await expect(option).to_have_text(
        ["nameThe name in /v1/status, in explanations and in metrics."]
    )
    await page.keyboard.press("Enter")
    await page.keyboard.type("all\nwhen: {med")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Control+Space")
    await expect(option.filter(has_text="video")).to_be_visible()
    await page.keyboard.press("ArrowUp")
    await page.keyboard.press("Escape")
    await expect(option).to_have_count(0)
    await page.keyboard.type("tr")
    await page.keyboard.press("Enter")
    await page.keyboard.type("}\nto: [f")
    await option.click()
    await page.keyboard.type("]\n")
    written = "- name: all\n  when: {media: true}\n  to: [fast]\n  "
    await expect(page.get_by_label("Document")).to_have_value(re.compile(re.escape(written) + "$"))

    await page.get_by_text("All fields").click()
    await page.get_by_label("Find a field").fill("isolation")
    await expect(page.locator("#field-list dt")).to_have_text([re.compile("prefix.isolation")])

    await page.get_by_label("Load an example").select_option("teams")
    await page.get_by_role("dialog").get_by_role("button", name="Replace").click()
    await expect(page.locator("#check")).to_have_text("Valid")
