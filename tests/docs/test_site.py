"""The site that `make docs` builds: complete, without a broken link, and without a request to anywhere else."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from playwright.sync_api import sync_playwright

import headway
from headway.cli import VERBS

ROOT = Path(__file__).parents[2]
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Links(HTMLParser):
    """What a page links to, what it loads, and the names in it that links may lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if _LOADED.get(tag) in given and given.get("rel") not in ("prev", "next", "canonical"):
            self.loads.append(given[_LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: what mkdocs warns of is an error."""
    directory = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        warnings.simplefilter("ignore")  # those of Python, by packages of others
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(directory), strict=True))
    return directory


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Links]:
    found = {path.relative_to(site).as_posix(): path for path in site.rglob("*.html")}
    found.pop("404.html")  # for servers, with links that begin at their root
    return {page: Links(path.read_text()) for page, path in found.items()}


def test_every_page_is_there(pages: dict[str, Links]) -> None:
    written = {
        path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in ROOT.glob("docs/**/*.md")
    }
    assert written - pages.keys() == set()
    assert {"cli.html", "security.html", "changelog.html", "api/index.html", "api/train.html"} <= pages.keys()


def test_links_of_the_site_lead_somewhere(pages: dict[str, Links], site: Path) -> None:
    broken = []
    for page, found in pages.items():
        for link in (*found.links, *found.loads):
            if re.match(r"[a-z]+:", link):
                continue
            target, name = urldefrag(urljoin(page, unquote(link)))
            known = pages.get(target or page)
            if not (known or (site / target).is_file()) or (name and known and name not in known.names):
                broken.append(f"{page}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(pages: dict[str, Links], site: Path) -> None:
    outside = [f"{page}: {load}" for page, found in pages.items() for load in found.loads if "//" in load]
    for sheet in site.rglob("*.css"):
        outside += re.findall(r"(?:@import|url\()[\"' ]*(?:https?:)?//[^)\"']+", sheet.read_text())
    assert outside == []


def test_every_verb_and_every_public_name_is_in_the_reference(pages: dict[str, Links]) -> None:
    assert {f"headway-{verb}" for verb in VERBS} - pages["cli.html"].names == set()
    assert {"headway-data-pack", "headway-plan-search"} <= pages["cli.html"].names
    names = {f"hw{name.lower()}" for name in headway.__all__ if callable(getattr(headway, name))}
    assert names - pages["api/headway.html"].names == set()
    assert "hwdatashardloader" in pages["api/data.html"].names


def test_search_works_without_a_server_and_without_a_network(site: Path) -> None:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        reason = "there is no Chromium (scripts/install-services.sh installs it)"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    asked: list[str] = []
    complaints: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844})  # a phone
        page.set_default_timeout(60_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.goto((site / "index.html").as_uri())
        width = page.evaluate("document.documentElement.scrollWidth")
        page.locator("label[for=__search]").first.click()
        page.locator("[data-md-component=search-query]").press_sequentially("requeue")
        page.locator(".md-search-result__item").first.wait_for()
        browser.close()
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert complaints == []
    assert width <= 390, "the page is as wide as the screen"
