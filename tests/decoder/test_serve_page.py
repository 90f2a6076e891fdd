"""The page at `/`: served to everybody, within itself, and in a browser as somebody uses it."""

import re

import pytest

from .serving import served, speaking_decoder


@pytest.fixture(scope="module")
def dec():
    return speaking_decoder()


def test_it_needs_no_key_and_nothing_from_elsewhere(dec):
    with served(dec, api_key="secret") as server:
        answer = server.http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"https?://|//[a-z]+\.|@import|<link|<img", answer.text)
    # All that its script looks for is there.
    named = set(re.findall(r'at\("(\w+)"\)', answer.text))
    assert named == set(re.findall(r' id="(\w+)"', answer.text)) & named and len(named) > 10


def test_the_methods_that_it_offers_are_those_that_can_be_asked_for(dec):
    with served(dec) as server:
        offered = server.http.get("/props").json()["methods"]
        assert {"ar", "auto", "tokenswift", "prompt-lookup"} <= set(offered) and "draft-model" not in offered
        for method in offered:
            body = {"model": "tiny", "prompt": "a", "max_tokens": 2, "method": method}
            assert server.post(body).status_code == 200, method


@pytest.mark.slow
def test_in_a_browser(dec, tmp_path):
    """Typing, stopping, a schema, an error; on a phone, too. Needs playwright and the distribution's Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with served(dec) as server, sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for width, scheme in ((1280, "light"), (390, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            faults = []
            page.on("pageerror", lambda error, faults=faults: faults.append(str(error)))
            page.on("console", lambda told, faults=faults: faults.append(told.text) if told.type == "error" else None)
            page.goto(server.url)
            assert page.evaluate("document.documentElement.dataset.theme") == scheme
            page.get_by_role("button", name="Settings").click()
            page.locator("#tokens").fill("40")
            page.locator("#method").select_option("tokenswift")
            page.get_by_role("button", name="Settings").click()
            page.locator("#message").fill("Call me?")
            page.get_by_role("button", name="Send").click()
            page.wait_for_selector("#send:visible", timeout=60_000)
            chat = [{"role": "user", "content": "Call me?"}]
            body = {"messages": chat, "max_tokens": 40, "seed": 0, "temperature": 0.7, "method": "ar"}
            expected = server.post(body, "/v1/chat/completions").json()["choices"][0]["message"]["content"]
            shown = page.locator(".said.assistant").first
            assert shown.evaluate("box => box.textContent") == expected
            assert "40 tokens" in page.locator(".told").first.text_content()
            assert shown.locator("mark").count()
            page.screenshot(path=tmp_path / f"answer-{width}.png")
            # Stopped half way.
            page.get_by_role("button", name="Settings").click()
            page.locator("#tokens").fill("3000")
            page.locator("#message").fill("And on")
            page.keyboard.press("Enter")
            page.get_by_role("button", name="Stop").click(timeout=20_000)
            page.wait_for_selector("#send:visible", timeout=20_000)
            assert server.idle()
            # An error is told, and the message can be sent again.
            page.locator("#schema").fill('{"type": "nonsense"}')
            page.locator("#tokens").fill("30")
            page.locator("#message").fill("In JSON")
            page.keyboard.press("Enter")
            page.wait_for_selector(".bad", timeout=20_000)
            assert "schema" in page.locator(".bad").last.text_content()
            page.locator("#schema").fill('{"type": "array", "items": {"type": "boolean"}, "maxItems": 2}')
            page.locator("#message").fill("In JSON")
            page.keyboard.press("Enter")
            page.wait_for_selector("#send:visible", timeout=60_000)
            assert re.fullmatch(
                r"\[.*\]", page.locator(".said.assistant").last.evaluate("box => box.textContent"), re.S
            )
            page.screenshot(path=tmp_path / f"settings-{width}.png")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.get_by_role("button", name="Light or dark").click()
            assert page.evaluate("document.documentElement.dataset.theme") != scheme
            page.screenshot(path=tmp_path / f"other-{width}.png")
            # The request that was refused is an error on the console, and the only one.
            assert all("400" in fault for fault in faults), faults
            page.close()
        browser.close()
