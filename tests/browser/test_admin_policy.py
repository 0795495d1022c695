"""The policy on the page for admins: edit, errors, comparison, activation and rollback."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.async_api import expect

from policies.yaml_io import write_yaml
from tests.support.browser_tab import BrowserTab
from tests.support.policies import PolicyAdmin, single_pool_policy, to_yaml
from tests.support.running_gateway import RunningGateway

pytestmark = pytest.mark.asyncio(loop_scope="session")

ALL_TO_VLM = to_yaml(single_pool_policy("all", lanes=("vlm",)))


def pool_of(gateway: RunningGateway, **fields: Any) -> str:
    response = gateway.chat(**fields)
    assert response.status_code == 200, response.text
    return str(response.headers["x-paceline-pool"])


async def editor_text(tab: BrowserTab) -> str:
    """Wait for the policy in the editor, and return its text."""
    await expect(tab.page.locator("#active-version")).to_contain_text("is active")
    return await tab.page.get_by_label("Document").input_value()


async def test_an_invalid_edit_is_reported_during_typing_with_a_link_to_its_line(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_admin(gateway_with_worker)
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


async def test_an_edit_is_compared_activated_and_rolled_back(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    assert [pool_of(gateway_with_worker, temperature=0) for _ in range(3)] == ["text-mtp"] * 3
    await tab.open_admin(gateway_with_worker)
    await editor_text(tab)

    await tab.fill_policy(ALL_TO_VLM)
    await tab.button("Compare").click()
    difference = page.locator("#difference")
    await expect(difference).to_contain_text(
        "Of the last 3 requests, 3 would be routed differently."
    )
    await expect(difference.locator("tr.goes")).to_have_text(["text-mtpall3"])
    await expect(difference.locator("li.added", has_text="pools.all")).to_be_visible()

    await page.get_by_label("Your name").fill("Änne")
    await page.get_by_label("Purpose").fill("ünder test <b>")
    await tab.button("Apply as version 2").click()
    await expect(page.locator("#active-version")).to_contain_text("Version 2 is active · Änne")
    newest = page.locator("#history li").first
    await expect(newest).to_contain_text("ünder test <b>")
    assert pool_of(gateway_with_worker, temperature=0) == "all"

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
    assert pool_of(gateway_with_worker, temperature=0) == "text-mtp"
    versions = gateway_with_worker.admin.get("/admin/v1/policy/history").json()["versions"]
    assert [(version["reason"], version["note"]) for version in versions[:2]] == [
        ("rollback", "back to version 1: too slow"),
        ("edit", "ünder test <b>"),
    ]


async def test_the_second_of_two_edits_conflicts_and_its_text_is_kept(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_admin(gateway_with_worker)
    await editor_text(tab)
    await tab.fill_policy(ALL_TO_VLM)
    await expect(page.locator("#check")).to_have_text("Valid")
    with PolicyAdmin(gateway_with_worker.url, gateway_with_worker.admin_key) as bob:
        assert bob.put(single_pool_policy("slow"), x_paceline_author="bob").status_code == 200
    await page.get_by_label("Purpose").fill("second edit")
    # Disabled already if the page has seen the edit of bob by now.
    await page.locator("#apply-button").evaluate("button => button.click()")
    conflict = page.locator("#conflict")
    await expect(conflict).to_contain_text("The policy has changed. Version 2 is active")
    await expect(page.locator("#apply-button")).to_be_disabled()
    await page.get_by_label("Document").press("End")
    await page.get_by_label("Document").type(" ")
    await expect(page.locator("#check")).to_have_text("Valid")
    await expect(page.locator("#apply-button")).to_be_disabled()
    await tab.fill_policy(ALL_TO_VLM)
    assert pool_of(gateway_with_worker) == "slow", "the edit of bob is still active"

    await tab.button("Load version 2 (your text stays in this tab)").click()
    await expect(page.get_by_label("Document")).to_have_value(
        write_yaml(single_pool_policy("slow"))
    )
    await tab.button("Restore my text").click()
    await expect(page.get_by_label("Document")).to_have_value(ALL_TO_VLM)
    await tab.button("Apply as version 3").click()
    await expect(page.locator("#active-version")).to_contain_text("Version 3 is active")
    assert pool_of(gateway_with_worker) == "all"


async def test_the_page_loads_the_edit_of_another_admin_if_the_editor_is_unchanged(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    await tab.open_admin(gateway_with_worker)
    await editor_text(tab)
    with PolicyAdmin(gateway_with_worker.url, gateway_with_worker.admin_key) as bob:
        bob.put(single_pool_policy("slow"), x_paceline_author="bob")
    await expect(tab.page.locator("#active-version")).to_contain_text("Version 2 is active · bob")
    assert await editor_text(tab) == write_yaml(single_pool_policy("slow"))


async def test_the_editor_completes_fields_lists_them_and_loads_examples(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    page = tab.page
    await tab.open_admin(gateway_with_worker)
    await editor_text(tab)
    editor = page.get_by_label("Document")
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
    await expect(editor).to_have_value(re.compile(re.escape(written) + "$"))

    await page.get_by_text("All fields").click()
    await page.get_by_label("Find a field").fill("isolation")
    await expect(page.locator("#field-list dt")).to_have_text([re.compile("prefix.isolation")])

    await page.get_by_label("Load an example").select_option("teams")
    await page.get_by_role("dialog").get_by_role("button", name="Replace").click()
    await expect(page.locator("#check")).to_have_text("Valid")
