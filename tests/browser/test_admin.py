"""The page for admins: sign-in, keys, the policy and workers."""

import re
import shlex

import pytest
from playwright.async_api import Route, expect

from paceline.pairing import read_code
from policies.yaml_io import write_yaml
from tests.support.browser_tab import BrowserTab
from tests.support.heartbeats import send_heartbeats
from tests.support.pairing import pair
from tests.support.policies import PolicyAdmin, single_pool_policy, to_yaml
from tests.support.running_gateway import RunningGateway, begun, status_and_code
from tests.support.scripted_worker import DONE, JOIN_TOKEN, Script

pytestmark = pytest.mark.asyncio(loop_scope="session")

REFUSAL = "This is not the admin key of this gateway."


async def test_c3_the_key_or_a_link_with_it_signs_in_and_is_in_no_url_and_no_other_tab(
    module_gateway: RunningGateway, tab: BrowserTab
) -> None:
    page, key, url = tab.page, module_gateway.admin_key, module_gateway.url
    sign_in = page.get_by_role("heading", name="Sign in")
    refusal, version = page.locator("#sign-in-refusal"), page.locator("#active-version")
    await tab.open(url, "/admin")
    for invalid_key in ("wrong", "schlüssel", "two words"):
        await page.get_by_label("Admin key").fill(invalid_key)
        await tab.button("Sign in").click()
        await expect(refusal).to_contain_text(REFUSAL)
        await expect(page.get_by_label("Admin key")).to_have_value("")
    await page.get_by_label("Admin key").fill(key)
    await page.keyboard.press("Enter")
    await expect(version).to_contain_text("Version 1 is active")
    assert not [one for one in tab.requested_urls if key in one]
    await page.reload()
    await expect(version).to_contain_text("Version 1 is active")
    storage = "[document.cookie, JSON.stringify({...localStorage}), location.href].join()"
    assert key not in await page.evaluate(storage)

    await tab.button("Sign out").click()
    await expect(sign_in).to_be_visible()
    await tab.open_admin(module_gateway)
    await expect(version).to_contain_text("Version 1 is active")
    assert page.url == f"{url}/admin"
    await page.evaluate("sessionStorage.setItem('paceline-admin-key', 'expired')")
    await page.reload()
    await expect(refusal).to_contain_text(REFUSAL)

    second = BrowserTab(await page.context.new_page())
    await second.open_admin(module_gateway)
    await expect(second.page.locator("#active-version")).to_contain_text("Version 1 is active")
    assert second.page.url == f"{url}/admin"
    await second.button("Sign out").click()
    await second.page.reload()
    await expect(second.page.get_by_role("heading", name="Sign in")).to_be_visible()
    await second.page.goto(f"{url}/admin#admin-key=wrong")
    await expect(second.page.locator("#sign-in-refusal")).to_contain_text(REFUSAL)
    assert second.page.url == f"{url}/admin"
    await second.page.close()


async def test_a_key_is_shown_once_allows_its_pools_and_is_revoked_and_wrong_terms_are_explained(
    gateway_with_worker: RunningGateway, tab: BrowserTab
) -> None:
    page, gateway = tab.page, gateway_with_worker
    assert gateway.chat().status_code == 200
    await tab.open_admin(gateway, "#keys")
    await expect(page.locator("#keys")).to_contain_text("No key exists yet")
    await expect(page.locator("#usage tbody tr")).to_contain_text("Without a key1")
    await tab.button("New key").click()
    form = page.get_by_role("dialog")
    await form.get_by_label("Name").fill("Ann")
    await form.get_by_label("Team").fill("lab")
    await form.get_by_label("Requests a minute").fill("2")
    await form.get_by_label("vlm").check()
    await tab.button("Create key").click()
    assert gateway.admin.get("/admin/v1/keys").json()["keys"] == []
    await form.get_by_label("All clients need a key from now on").check()
    await form.get_by_label("Models").fill("gpt-4o-mini")
    await tab.button("Create key").click()
    await expect(form.get_by_role("alert")).to_contain_text("is an alias; use 'demo'")
    await expect(form.get_by_label("Name")).to_have_value("Ann")
    await form.get_by_label("Models").fill("demo")
    await tab.button("Create key").click()
    secret = await page.get_by_label("The key", exact=True).input_value()
    assert secret.startswith("pk-")
    snippet = page.get_by_role("region", name="Code for curl")
    await expect(snippet).to_contain_text(f"Authorization: Bearer {secret}")
    await expect(snippet).to_contain_text(f"{gateway.url}/v1/chat/completions")
    await tab.button("Close").click()
    row = page.locator("#keys tbody tr")
    await expect(row).to_contain_text("2 requests/min")
    await expect(row).to_contain_text("pool vlm")
    assert secret not in await page.content()

    assert status_and_code(gateway.chat()) == (401, "invalid_api_key")
    gateway.use_key(secret)
    assert gateway.chat(temperature=0).headers["x-paceline-pool"] == "vlm"

    await tab.button("Edit the key Ann").click()
    await form.get_by_label("Requests a minute").fill("")
    await tab.button("Save").click()
    await expect(row).not_to_contain_text("requests/min")
    assert [gateway.chat().status_code for _ in range(3)] == [200] * 3

    await page.reload()
    await expect(page.locator("#usage tbody tr").first).to_contain_text("Ann4")
    await expect(page.locator("#usage .legend")).to_have_text("AnnWithout a key")
    await expect(page.locator("#usage .day span")).to_have_count(2)
    async with page.expect_download() as download:
        await tab.button("Download CSV").click()
    assert "Ann,lab,4," in (await (await download.value).path()).read_text()

    await tab.button("Replace the secret of the key Ann").click()
    await tab.button("Replace secret").click()
    new_secret = await page.get_by_label("The key", exact=True).input_value()
    await tab.button("Close").click()
    assert gateway.chat().status_code == 401
    gateway.use_key(new_secret)
    assert gateway.chat().status_code == 200
    await page.reload()
    await expect(row).to_contain_text("used 1 times since, from 127.0.0.1")

    await tab.button("Revoke the key Ann").click()
    await tab.button("Revoke key").click()
    await expect(row).to_contain_text("revoked")
    assert gateway.chat().status_code == 401


ALL_TO_VLM = to_yaml(single_pool_policy("all", lanes=("vlm",)))


async def editor_text(tab: BrowserTab) -> str:
    """Wait for the policy in the editor, and return its text."""
    await expect(tab.page.locator("#active-version")).to_contain_text("is active")
    return await tab.page.get_by_label("Document").input_value()


async def test_an_edit_is_compared_activated_and_rolled_back(gateway_with_worker, tab) -> None:
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


async def test_a_new_mac_appears_and_a_cordoned_or_drained_one_finishes_its_answers_alone(
    gateway_with_worker, worker, second_worker, tab
) -> None:
    page, gateway = tab.page, gateway_with_worker
    worker.script = second_worker.script = Script(hang_after=1)
    await tab.open_admin(gateway, "#workers")
    card = page.get_by_role("article", name="fake-a")
    await expect(card).to_contain_text("ready")
    await tab.button("Add a Mac").click()
    dialog = page.get_by_role("dialog", name="Add a Mac")
    await expect(dialog).to_contain_text("paceline up --host 0.0.0.0")
    await expect(dialog).to_contain_text("paceline join-engine http://ITS-ADDRESS:PORT --url http")
    await page.keyboard.press("Escape")

    async def open_gateway(route: Route) -> None:
        answer = await (response := await route.fetch()).json()
        joining = {**answer["joining"], "url": "http://192.0.2.1:80", "token_file": "/a b/it's"}
        await route.fulfill(response=response, json={**answer, "joining": joining})

    await page.route("**/admin/v1/workers", open_gateway)
    await tab.button("Add a Mac").click()
    await expect(dialog.locator("pre code").first).to_have_text("paceline join http://192.0.2.1:80")
    lines = await dialog.locator("pre code").all_text_contents()
    await tab.button("Show a code").click()
    code = dialog.locator("code.title")
    await expect(code).to_have_text(re.compile("^[A-Z]{4}-[A-Z]{4}$"))
    pair(gateway, read_code(await code.text_content() or ""), "mini")
    line = lines[1]
    assert shlex.split(line.replace('"', "")) == [
        *("echo", "PACELINE_JOIN_TOKEN=$(cat", "/a b/it's)", "paceline", "worker"),
        *("--join", "http://192.0.2.1:80"),
    ]
    await expect(tab.button("Copy the command that prints the command")).to_be_visible()
    await page.unroute_all(behavior="ignoreErrors")
    await expect(dialog).to_contain_text("Waiting for a new worker")
    assert JOIN_TOKEN not in await page.content()
    async with page.expect_response("**/admin/v1/workers"):
        pass
    assert gateway.send_heartbeat(second_worker, url="http://127.0.0.1:1").is_error
    await expect(dialog).to_contain_text("fake-b: The worker's address refuses")
    with send_heartbeats(gateway, second_worker):
        await expect(dialog).to_contain_text("fake-b: ready")
        await page.keyboard.press("Escape")
        await expect(page.locator("#fleet-line")).to_contain_text("2 of 2 workers ready")
        await tab.button("Cordon fake-a").click()
        await expect(card).to_contain_text("by admin. It has no running requests")
        second_worker.resume.set()
        assert [gateway.chat().status_code for _ in range(6)] == [200] * 6
        assert not worker.requests
        await tab.button("Uncordon fake-a").click()
        await expect(card).to_contain_text("ready")
    paired = page.get_by_role("article", name="mini")
    await expect(paired).to_contain_text("Paired just now.")
    await tab.button("Unpair mini").click()
    await expect(paired).to_have_count(0)
    gateway.remove_worker(second_worker, restarting=True)
    lost = page.get_by_role("article", name="fake-b")
    await expect(lost).to_contain_text("Its last report arrived just now. Its process ended")
    await expect(page.locator("#fleet-line")).to_contain_text("1 of 2 workers ready")
    gateway.remove_worker(second_worker)
    await expect(lost).to_contain_text("It signed off.")
    await expect(page.locator("#fleet-line")).to_contain_text("1 of 1 worker ready")
    with begun(gateway.stream()) as read:
        await tab.button("Drain fake-a").click()
        await expect(card).to_contain_text("1 request still runs.")
        worker.resume.set()
        assert read().endswith(DONE)
    await expect(page.locator("#notice")).to_have_text(
        "fake-a has no running requests, so you can stop it."
    )
