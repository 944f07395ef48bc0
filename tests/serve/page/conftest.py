"""Headless Chromium on the real service."""

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from types import ModuleType

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, sync_playwright

from tests.serve.page.visit import ROOT, Visit

CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="package")
def drawing() -> ModuleType:
    """``scripts/make_examples.py``, which knows where the shapes are."""
    spec = importlib.util.spec_from_file_location(
        "make_examples", ROOT / "scripts" / "make_examples.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.fail(
            "the page's tests need Chromium: `make browser` installs it with apt-get; elsewhere install it "
            "by the system's means, so that `chromium` or `chromium-browser` can be run"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def desk(browser: Browser) -> BrowserContext:
    """A wide window, light, with one cache for all tests that ask for nothing else."""
    return browser.new_context(viewport={"width": 1280, "height": 860})


@pytest.fixture
def visit(
    browser: Browser,
    desk: BrowserContext,
    ray_url: str,
    service: httpx.Client,
    request: pytest.FixtureRequest,
) -> Iterator[Visit]:
    """The page, opened. Whatever a test does: no error of a script, and nothing asked of anyone else."""
    options = getattr(request, "param", None)
    context = browser.new_context(**options) if options else desk
    page = context.new_page()
    page.set_default_timeout(20_000)
    visit = Visit(page, ray_url)
    page.on("request", lambda request: visit.requests.append(request))

    def complain(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            visit.complaints.append(message.text)

    page.on("console", complain)
    page.on("pageerror", lambda error: visit.complaints.append(f"uncaught: {error}"))
    page.goto(f"{ray_url}/")
    page.wait_for_selector("#server[data-state=ready]")
    page.wait_for_selector(".example")
    yield visit
    elsewhere = [
        r.url for r in visit.requests if not r.url.startswith((f"{ray_url}/", "blob:", "data:"))
    ]
    # The browser itself writes a line for each answer that is an error.
    faults = [text for text in visit.complaints if not text.startswith("Failed to load resource")]
    page.close()
    if options:
        context.close()
    assert elsewhere == []
    assert faults == []
