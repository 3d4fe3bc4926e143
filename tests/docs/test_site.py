"""The built site: links are valid, and a browser renders every page, also at phone width, and finds names.

The browser is Debian's chromium with chromium-driver, or whatever is on the PATH under these names. Where it is missing
these tests are skipped, unless CUDNN_SDPA_NEEDS_BROWSER is set, as in continuous integration.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest

ROOT = Path(__file__).parent.parent.parent
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site: the one built by `make docs` if it is up to date, otherwise a new one."""
    sources = [ROOT / "mkdocs.yml", ROOT / "CHANGELOG.md"]
    for folder, pattern in (
        ("docs", "**/*"),
        ("samples", "*"),
        ("cudnn_sdpa", "**/*.py"),
        ("scripts", "site_hooks.py"),
    ):
        sources += (ROOT / folder).glob(pattern)
    built = ROOT / "site" / "index.html"
    if built.exists() and built.stat().st_mtime >= max(path.stat().st_mtime for path in sources if path.is_file()):
        return built.parent
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    command += ["-f", str(ROOT / "mkdocs.yml")]  # from another folder, as a hosting service may
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


class Links(HTMLParser):
    """A page's links, the files that it loads, and its anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.places |= {value for name in ("id", "name") if (value := values.get(name))}
        self.targets += [value for name in ("href", "src") if (value := values.get(name))]


def test_every_link_is_valid(site):
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(pages) > 30
    broken = []
    for page, links in pages.items():
        for target in links.targets:
            if urlsplit(target).scheme:
                continue
            url = urlsplit(urljoin(page.as_uri(), target))
            path = Path(unquote(url.path))
            path = path / "index.html" if path.is_dir() else path
            if not path.is_file() or (
                url.fragment and path in pages and unquote(url.fragment) not in pages[path].places
            ):
                broken.append(f"{page.relative_to(site)}: {target}")
    assert broken == []


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        message = "chromium and chromedriver are not on the PATH; on Debian: apt-get install chromium chromium-driver"
        pytest.fail(message) if os.environ.get("CUDNN_SDPA_NEEDS_BROWSER") else pytest.skip(message)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for flag in (
        *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
        *("disable-component-update", "disable-sync", "disable-dev-shm-usage", "window-size=1400,1000"),
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(programs[1]))
    yield driver
    driver.quit()


def requests(browser) -> list[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


def pages_of(site: Path) -> list[str]:
    """The paths of all pages, relative to the site."""
    pages = [page.relative_to(site) for page in site.rglob("index.html")]
    return sorted("" if str(page.parent) == "." else f"{page.parent.as_posix()}/" for page in pages)


HAS_HEADING = "return [...document.querySelectorAll('h1')].some(h => h.innerText.trim())"


@pytest.mark.slow
def test_every_page_renders_on_a_phone(site, address, browser):
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.support.wait import WebDriverWait

    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    complaints = []
    for page in pages_of(site):
        browser.get(address + page)
        with contextlib.suppress(TimeoutException):  # a busy machine lays pages out late
            WebDriverWait(browser, 10).until(lambda shown: shown.execute_script(HAS_HEADING))
        title, headings, needed, there = browser.execute_script(
            "return [document.title, [...document.querySelectorAll('h1')].filter(h => h.innerText.trim()).length,"
            " document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        if not title.strip() or headings < 1:
            complaints.append(f"{page} has the title {title!r} and {headings} headings")
        if needed > there:
            complaints.append(f"{page} is {needed} pixels wide, where there are {there}")
        complaints += [f"{page}: {entry['message']}" for entry in browser.get_log("browser")]
        foreign = [url for url in requests(browser) if url.startswith("http") and not url.startswith(address)]
        complaints += [f"{page} asks for {url}" for url in foreign]
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert complaints == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "page"), [("sdpa_varlen", "/api/attention/"), ("PagedKVCache", "/api/paged/")])
def test_the_search_finds_a_name(address, browser, name, page):
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get(address)
    # each typed letter replaces the results, perhaps while they are read
    wait = WebDriverWait(browser, 20, ignored_exceptions=[StaleElementReferenceException])
    wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, ".md-search__input"))
    browser.find_element(By.CSS_SELECTOR, ".md-search__input").click()
    browser.find_element(By.CSS_SELECTOR, ".md-search__input").send_keys(name)

    def leads_to_the_page(_: object) -> bool:
        found = [link.get_attribute("href") for link in browser.find_elements(*RESULTS)]
        return any(urlsplit(link).path == page for link in found)

    assert wait.until(leads_to_the_page, f"the search for {name} does not find {page}")


RESULTS = ("css selector", ".md-search-result__link")
