"""The site that `make site` has built: every page is there, every link leads to one, and tutorials
show what they printed."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import ffserve

pytestmark = pytest.mark.site

ROOT = Path(__file__).parents[2]
SITE = ROOT / "dist/site" / ffserve.__version__
TUTORIALS = sorted(path.stem for path in (ROOT / "docs/tutorials").glob("[a-z]*.md"))


class Page(HTMLParser):
    """What a page links to, and the names of its places."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.names: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.names.add(value)
            # The addresses of `<link rel=canonical>` and of other sites are not asked.
            if name in ("href", "src") and value and not urlsplit(value).scheme:
                self.links.add(value)


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    found = {path: Page(path) for path in SITE.rglob("*.html") if "_static" not in path.parts}
    assert found, "run `make site`"
    return found


def test_every_document_of_users_is_a_page(pages: dict[Path, Page]) -> None:
    named = {path.relative_to(SITE).with_suffix("").as_posix() for path in pages}
    documents = {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
    }
    assert documents <= named and "api" in named


def test_every_link_of_the_site_leads_somewhere(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            to = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
            assert to.is_relative_to(SITE.parent), f"{path}: {link}"
            to = to / "index.html" if to.is_dir() else to
            assert to.exists(), f"{path}: {link}"
            if anchor and to in pages and not path.is_relative_to(SITE / "_modules"):
                assert unquote(anchor) in pages[to].names, f"{path}: {link}"


def test_pages_load_nothing_from_other_sites() -> None:
    loads = re.compile(r"<(?:script|img)[^>]*\ssrc=\"https?://|<link[^>]*stylesheet[^>]*https?://")
    for path in SITE.rglob("[!_]*.html"):
        assert not loads.search(path.read_text()), path


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_is_there_with_what_it_printed(name: str) -> None:
    notebook = json.loads((SITE / "tutorials" / f"{name}.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells and all(cell["execution_count"] for cell in cells)
    assert not any(each["output_type"] == "error" for cell in cells for each in cell["outputs"])
    printed = [cell for cell in cells if cell["outputs"]]
    page = (SITE / "tutorials" / f"{name}.html").read_text()
    assert page.count('<div class="cell_output') >= len(printed) > 0


def test_the_reference_has_every_public_name() -> None:
    page = (SITE / "api.html").read_text()
    import ffserve.torch

    for name in ffserve.torch.__all__:
        assert f'id="ffserve.torch.{name}"' in page, name
    for name in ("open", "create", "Reader.read_batch", "Reader.lease", "UsageError"):
        assert f'id="ffserve.{name}"' in page, name


def test_a_newer_version_can_be_chosen() -> None:
    listed = json.loads((SITE.parent / "versions.json").read_text())
    assert ffserve.__version__ in [each["version"] for each in listed]
    assert f"url={listed[0]['version']}/" in (SITE.parent / "index.html").read_text()
