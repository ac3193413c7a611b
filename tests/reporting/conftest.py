"""A real browser for the pages, with every request recorded."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from example_run import write_example_run
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from dualtrack.reporting.manifest import write_manifest
from dualtrack.reporting.report_page import write_page

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class OpenPage:
    """A page that was opened: what it said on the console, and what it asked the network for."""

    page: Page
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def example_pages(tmp_path_factory):
    """Write each kind of run once, page and seal included, and hand out its folder."""
    reports, made = tmp_path_factory.mktemp("reports"), {}

    def folder_of(kind):
        if kind not in made:
            made[kind] = write_example_run(reports, kind)
            write_page(made[kind])
            write_manifest(made[kind])
        return made[kind]

    return folder_of


@pytest.fixture
def run(tmp_path, example_pages):
    """Hand out a fresh copy of a run; its figures are drawn already, its page is not to be trusted."""

    def copy(kind):
        folder = shutil.copytree(example_pages(kind), tmp_path / "reports" / example_pages(kind).name)
        (folder / "index.html").unlink()
        return folder

    return copy


@pytest.fixture(scope="session")
def browser():
    """Chromium, headless; its absence is a failure, since a page that nobody opened is not tested."""
    if not CHROMIUM.exists():
        pytest.fail(f"expected {CHROMIUM}, found none; install it with `apt-get install chromium`", pytrace=False)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser):
    """Open a file in a window of a given size and colour scheme; whatever leaves the folder is blocked and recorded."""
    contexts = []

    def open_file(path, width=1366, height=768, scheme="light", **options):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
        contexts.append(context)
        return open_in(context, path)

    yield open_file
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def small_laptop(browser: Browser, example_pages):
    """Each kind of page, opened once on 1366 x 768 and shared by the tests that only look."""
    context, opened = browser.new_context(viewport={"width": 1366, "height": 768}, color_scheme="light"), {}

    def page_of(kind):
        if kind not in opened:
            opened[kind] = open_in(context, example_pages(kind) / "index.html")
        return opened[kind]

    yield page_of
    context.close()


def open_in(context: BrowserContext, path: Path) -> OpenPage:
    """Open a file in a new page of `context`, with its console and its requests recorded."""
    opened = OpenPage(page=context.new_page())

    def judge(route):
        address = route.request.url
        if address.startswith(("file:", "data:")):
            route.continue_()
        else:
            opened.requests.append(address)
            route.abort()

    opened.page.route("**/*", judge)
    opened.page.on("console", lambda message: opened.console.append(message.text))
    opened.page.on("pageerror", lambda error: opened.console.append(str(error)))
    opened.page.goto(path.as_uri(), wait_until="load")
    return opened
