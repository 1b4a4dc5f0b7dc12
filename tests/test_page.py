"""The page at `/`: what the server sends, and what a browser makes of it. Every browser test fails on an error or a
violation of the policy in the browser's console, and on a request to anywhere else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_harness import ServerProcess, server_process, serving
from sonar_engine.server import dashboard
from sonar_engine.server.config import ServerConfig
from sonar_engine.server.dashboard import PAGE_FILES
from sonar_engine.testing.fake_engine import FakeOptions

FOLDER = Path(dashboard.__file__).parent / "page"
CHROMIUM = Path("/usr/bin/chromium")
DRAFTING = FakeOptions(tokens_per_step=4, drafts_per_step=3, step_seconds=0.02)
WAIT_MS = 20_000

OpenPage = Callable[..., Any]


async def test_the_page_and_its_files_come_with_a_strict_policy():
    async with serving() as served:
        for path, (name, media_type) in PAGE_FILES.items():
            answer = await served.http.get(path)
            assert answer.status_code == 200, path
            assert answer.content == (FOLDER / name).read_bytes()
            assert answer.headers["content-type"] == media_type
            assert "default-src 'self'" in answer.headers["content-security-policy"].split("; ")
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"


def test_every_file_of_the_page_is_served():
    assert {path.name for path in FOLDER.iterdir()} == {name for name, _ in PAGE_FILES.values()}


def test_the_page_has_nothing_inline_and_names_no_other_host():
    html = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\sstyle=|\son[a-z]+=", html)
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), path


async def test_the_numbers_are_those_of_the_engine():
    async with serving(DRAFTING) as served:
        await served.text("abc", max_tokens=9)
        data = (await served.http.get("/dashboard/data")).json()
        stats = await served.client.stats()
    assert (data["phase"], data["model"]) == ("ready", "fake")
    assert (data["drafter"], data["num_speculative_tokens"]) == ("fake", 3)
    assert data["stats"]["generation_tokens"] == stats.generation_tokens == 9
    assert data["stats"]["accepted_per_pos"] == stats.accepted_per_pos == [2, 2, 2]
    assert data["stats"]["step_seconds"] == stats.step_seconds


async def test_the_numbers_want_the_key_and_the_page_does_not():
    async with serving(server=ServerConfig(api_keys=("secret",))) as served:
        assert (await served.http.get("/")).status_code == 200
        assert (await served.http.get("/dashboard/data")).status_code == 401
        with_key = await served.http.get("/dashboard/data", headers={"Authorization": "Bearer secret"})
    assert with_key.status_code == 200


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process(DRAFTING) as process:
        yield process


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """Opens the page of a server; afterwards nothing may have gone wrong in it, but what `allow` matches."""
    opened: list[tuple[Any, str, list[str], str]] = []

    def open_one(url: str, allow: str = "(?!)", **context: Any) -> Any:
        page = browser.new_context(**context).new_page()
        page.set_default_timeout(WAIT_MS)
        faults: list[str] = []
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(url) else faults.append(request.url))
        opened.append((page, url, faults, allow))
        page.goto(url + "/")
        return page

    yield open_one
    for page, _, faults, allow in opened:
        page.context.close()
        assert [fault for fault in faults if not re.search(allow, fault)] == []


def ask(page: Any, text: str, tokens: int = 40) -> None:
    page.get_by_label("Most tokens of an answer").fill(str(tokens))
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def until_done(page: Any, status: str = "Done") -> str:
    page.wait_for_function("start => document.querySelector('#status').textContent.startsWith(start)", arg=status)
    return page.text_content("#status")


def ready(page: Any) -> None:
    page.wait_for_function("document.querySelector('#server').textContent.includes('ready')")


def test_the_chat_streams_and_tints_what_was_drafted(server: ServerProcess, open_page: OpenPage):
    page = open_page(server.url)
    ready(page)
    ask(page, "hello", tokens=41)
    assert until_done(page) == f"Done (length): {numbers(page, 41)}"
    user, model = page.locator(".turn").all()
    assert user.text_content() == "Youhello"
    assert len(model.text_content().removeprefix("Model")) == 41
    drafted = [span.text_content() for span in model.locator(".drafted").all()]
    assert [len(text) for text in drafted] == [3] * 10
    assert model.locator(".drafted").first.evaluate("e => getComputedStyle(e).backgroundColor") != "rgba(0, 0, 0, 0)"


def numbers(page: Any, tokens: int) -> str:
    """The status line's numbers, of which the speed is the machine's own."""
    speed = re.search(r"([\d.]+) tokens a second", page.text_content("#status"))
    assert speed is not None and float(speed[1]) > 0
    return f"{tokens} tokens, {speed[0]}, acceptance length 4.00."
