"""The status page in Chromium: on a desk and on a phone, light and dark, live, safe from names.

With SCREENSHOTS=DIR in the environment the pictures of the documents are drawn there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon import DEADLINE_S, Daemon, Raw, damage, ready, sample, until, write
from http_daemon import answers, free_port, measured

from ffserve.limits import MOST_PAGE_JOBS

pytestmark = pytest.mark.page

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")
INTERVAL_S = 0.2
PATCH = (
    "import ffserve.server.status.page as page, ffserve.server.reading.engines as io; "
    f"page.EVENT_INTERVAL_S, io.SLOW_READ_S = {INTERVAL_S}, 0.05"
)
POINTS = 60
"""Events before a picture is taken."""
HOSTILE = "<img src=x onerror='window.broken=1'>"
HOSTILE_COMMAND = "\"><script>window.broken=1</script>'; \u202e \x1b[31m {{7*7}} " + "x" * 150
READING = """
import sys, time
import numpy as np
import ffserve
path, pause = sys.argv[1:3]
with ffserve.open(path, server="require") as reader:
    orders = [np.random.default_rng(epoch).permutation(len(reader)) for epoch in range(2)]
    print("ready", flush=True)
    for epoch in range(1_000_000):
        reader.announce(orders[epoch % 2], epoch=epoch)
        for start in range(0, len(reader), 32):
            try:
                reader.read(orders[epoch % 2][start : start + 32])
            except ffserve.ChecksumError:
                time.sleep(1000)
            time.sleep(float(pause))
"""
"""Ends its reading at a damaged sample."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium: bash .ci/setup --page")
    with sync_api.sync_playwright() as playwright:
        # Root has no sandbox of its own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(
    browser: Any, address: str, size: str = "desktop", scheme: str = "light"
) -> Iterator[Any]:
    """The page in a window; it must load nothing from elsewhere and report no error."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        device_scale_factor=1 if size == "desktop" else 2,
        is_mobile=size == "phone",
        color_scheme=scheme,
    )
    page, complaints, addresses = context.new_page(), [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: addresses.append(request.url))
    try:
        page.goto(f"http://{address}/")
        page.locator("#state.live").wait_for(timeout=1000 * DEADLINE_S)
        yield page
        assert not complaints
        assert all(url.startswith((f"http://{address}/", "data:")) for url in addresses), addresses
    finally:
        context.close()


@contextlib.contextmanager
def job(daemon: Daemon, path: str, title: str, pause_s: float) -> Iterator[None]:
    """A job that reads epoch after epoch."""
    folder = Path(path).parent
    program = folder / "train.py"
    program.write_text(READING)
    environment = {"FFSERVE_JOB": title, "FFSERVE_SOCKET": daemon.socket, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, program.name, path, str(pause_s)]
    with ready(command, env={**os.environ, **environment}, cwd=folder):
        yield


@pytest.fixture(scope="module")
def busy() -> Iterator[tuple[Daemon, str]]:
    """A daemon with jobs, a damaged sample and an arena that is too small."""
    directory = Path(tempfile.mkdtemp(prefix="data-"))
    images, tokens = (str(directory / name) for name in ("imagenet-000.ffr", "tokens.tfrecord"))
    write(images, [sample(index, [40_000]) for index in range(1500)])
    write(tokens, [sample(index, [2000]) for index in range(4000)])
    broken = write(directory / "broken.ffr", [sample(index, [5000]) for index in range(9)])
    damage(broken, 3)
    with (
        measured("--http-jobs", "all", arena="32MiB", patch=PATCH) as (daemon, address),
        job(daemon, images, "resnet-50", 0.01),
        job(daemon, images, "vit-small", 0.03),
        job(daemon, tokens, "", 0.005),
        job(daemon, broken, "eval", 0.0),
    ):
        yield daemon, address
    shutil.rmtree(directory)


def overflow(page: Any) -> int:
    """Return by how many pixels the page is wider than the window."""
    program = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    return int(page.evaluate(program))


CONTRAST = """() => {
  const part = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(Number);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const back = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const low = [];
  for (const node of document.querySelectorAll("h1, h2, p, th, td, span, a, footer")) {
    if (!node.textContent.trim() || !node.getClientRects().length) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(back(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(node.outerHTML.slice(0, 80));
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", SIZES)
def test_everything_is_shown(
    browser: Any, busy: tuple[Daemon, str], size: str, scheme: str
) -> None:
    _daemon, address = busy
    with opened(browser, address, size, scheme) as page:
        page.locator("#jobs tbody tr").nth(2).wait_for()
        text = page.locator("body").inner_text()
        expected = ("resnet-50", "vit-small", "imagenet-000.ffr", "damaged sample", "of 32.0 MiB")
        assert all(each in text for each in expected), text
        assert page.locator("#errors .value.wrong").inner_text() == "1"
        assert page.locator("#jobs progress").count() >= 3
        assert overflow(page) <= 0
        assert page.evaluate(CONTRAST) == []
        until(lambda: points(page) >= 10, "the graphs grow")
        if directory := os.environ.get("SCREENSHOTS"):
            until(lambda: points(page) >= POINTS, "the graphs are long")
            page.screenshot(path=Path(directory) / f"page-{size}-{scheme}.png", full_page=True)


def test_a_screenshot_of_the_page_ends(busy: tuple[Daemon, str], tmp_path: Path) -> None:
    """Headless Chromium waits for the end of all requests, and the event stream had none."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: bash .ci/setup --page")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--virtual-time-budget=9000"]
    command += [f"--user-data-dir={tmp_path}", "--window-size=1280,900"]
    command += ["--dump-dom", f"{busy[1]}/?once"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "resnet-50" in done.stdout, done.stderr


def points(page: Any) -> int:
    """Return how many points the first graph has."""
    line = page.locator("#samples .graph polyline").last.get_attribute("points") or ""
    return len(line.split())


def test_names_are_text(browser: Any, busy: tuple[Daemon, str], tmp_path: Path) -> None:
    daemon, address = busy
    name = tmp_path / "<b onmouseover='window.broken=1'>&lt;.ffr"
    with Raw(daemon.socket, job="j", title=HOSTILE, command=HOSTILE_COMMAND) as raw:
        raw.open(write(name, [bytes(9)] * 3))
        for size in SIZES:
            with opened(browser, address, size) as page:
                row = page.locator("#jobs tbody tr", has_text=HOSTILE)
                row.wait_for()
                assert "\\u202e \\x1b[31m {{7*7}}" in row.inner_text()
                assert "<b onmouseover='window.broken=1'>&lt;.ffr" in row.inner_text()
                assert page.locator("#jobs img, #jobs script, #jobs b, #files b").count() == 0
                assert page.evaluate("window.broken") is None
                assert overflow(page) <= 0


def test_ended_jobs_are_folded_below_those_that_run(browser: Any, tmp_path: Path) -> None:
    """40 of them made a page of 7,000 pixels on a phone."""
    path = write(tmp_path / "a.ffr", [sample(index, [500]) for index in range(50)])
    with measured("--http-jobs", "all", patch=PATCH) as (daemon, address), daemon.open(path):
        for number in range(40):
            title = f"{HOSTILE} {number}"
            with Raw(daemon.socket, job=f"j{number}", title=title, command=HOSTILE_COMMAND) as raw:
                raw.open(path)
        for size in SIZES:
            with opened(browser, address, size) as page:
                running, ended = (page.locator(f"#{id} tbody tr") for id in ("jobs", "ended"))
                running.wait_for()
                heading = page.locator("#ended h2")
                assert heading.inner_text().lower() == "40 ended jobs"
                assert top(page, "#jobs tbody tr") < top(page, "#ended h2")
                folded = height(page)
                assert folded < 2500 and overflow(page) <= 0
                assert not ended.first.is_visible()
                heading.click()
                ended.nth(4).wait_for()
                assert (running.count(), ended.count()) == (1, 5)
                assert f"{HOSTILE} 39" in ended.first.inner_text(), "the last one first"
                page.locator("#ended button").click()
                ended.nth(30).wait_for()
                assert ended.count() == MOST_PAGE_JOBS - 1
                assert page.locator("#ended p").inner_text() == "and 9 more: ffserve status --all"
                assert height(page) > folded and overflow(page) <= 0
                assert page.locator("#ended img, #ended script").count() == 0
                assert page.evaluate("window.broken") is None


def top(page: Any, selector: str) -> float:
    """Return where an element begins, asked at once, since the page replaces its elements."""
    return float(page.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().y"))


def height(page: Any) -> int:
    """Return the pixels of the whole page from top to bottom."""
    return int(page.evaluate("document.documentElement.scrollHeight"))


def test_numbers_change_without_loading_the_page_again(browser: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.ffr", [sample(index, [500]) for index in range(50)])
    with (
        measured("--http-jobs", "all", patch=PATCH) as (daemon, address),
        daemon.open(path) as reader,
        opened(browser, address) as page,
    ):
        assert page.locator("#samples .note").inner_text().startswith("0 in all")
        reader.read(range(50))
        page.locator("#samples .note", has_text="50 in all").wait_for()
        # What is being copied stays.
        cell = page.locator("#files td.text").first
        cell.wait_for()
        page.evaluate("getSelection().selectAllChildren(document.querySelector('#files td'))")
        time.sleep(4 * INTERVAL_S)
        assert page.evaluate("getSelection().toString()").strip() == path


def test_a_stranger_sees_totals_and_how_to_see_more(browser: Any, busy: tuple[Daemon, str]) -> None:
    with measured(patch=PATCH) as (_, address), opened(browser, address) as page:
        assert "administrators only" in page.locator("#hidden").inner_text()
        assert not page.locator("#jobs").is_visible()
    with opened(browser, busy[1]) as page:
        assert not page.locator("#hidden").is_visible()


def test_a_daemon_that_ends_is_noticed_and_its_return_too(browser: Any) -> None:
    with free_port() as address:
        daemon = Daemon(options=["--http", address], patch=PATCH)
        try:
            daemon.start()
            until(lambda: answers(address), "it answers")
            context = browser.new_context()
            page = context.new_page()
            page.goto(f"http://{address}/")
            page.locator("#state.live").wait_for()
            assert daemon.end() == 0
            page.locator("#state.lost", has_text="does not answer").wait_for()
            daemon.start()
            page.locator("#state.live").wait_for(timeout=1000 * DEADLINE_S)
            context.close()
        finally:
            daemon.close()
