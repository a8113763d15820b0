"""A real browser opens the report of 5,000 rows at once, without a complaint, on every screen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import pytest

from eagle_batch.job.adapting import Switch
from eagle_batch.job.store import Store
from eagle_batch.report.write import write_reports
from tests.job.fake_engine import LONG
from tests.report.browser import CHROMIUM, Tab, browser, browser_tab
from tests.report.finished import finished
from tests.report.test_page import point

pytestmark = pytest.mark.slow

ROWS = 5_000
MOST_BYTES, MOST_SECONDS = 3_000_000, 2.0
#: Width of a screen and whether it is dark.
SCREENS = [(1280, False), (1280, True), (390, False), (390, True)]
#: Seconds after which heads took over: two at once, one with the last point, one still later.
SWITCHED = (60.0, 61.0, 62.0, 180.0, 299.0, 305.0)
#: Least contrast of words and their ground.
CONTRAST = 4.5
#: All words of the plots: which plot, the word, its corners, its colour and that of its ground;
#: and the corners of the plot.
WORDS = """
Array.from(document.querySelectorAll('svg text'), text => {
  const at = e => (r => [r.left, r.top, r.right, r.bottom])(e.getBoundingClientRect());
  const svg = text.closest('svg'), card = text.closest('.card');
  return [svg.parentElement.getAttribute('aria-label'), text.textContent.trim(), at(text),
    getComputedStyle(text).fill, getComputedStyle(card).backgroundColor, at(svg)];
})
"""
Word = tuple[str, str, list[float], str, str, list[float]]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a job with everything that a report can show."""
    topics = [f"topic {n}" + (LONG if n % 700 == 3 else "") for n in range(ROWS)]
    output = {"rows_per_shard": 250, "spans": True}
    store = finished(tmp_path_factory.mktemp("job"), topics, samples=1, output=output)
    add_what_a_real_run_has(store)
    (key, _) = write_reports(store, price=2.5)
    return Path(store.root) / key


def add_what_a_real_run_has(store: Store) -> None:
    document = json.loads(store.get("_job/metrics.json") or b"")
    passes = [{"plain": min(n, 90), "4,4,8": max(0, n - 90)} for n in range(0, 600, 2)]
    document["series"] = [point(n, found) for n, found in enumerate(passes)]
    document["engine"]["passes_by_rows"] = [["4 4,4,8", 30], ["4 plain", 60], ["8 plain", 30]]
    heads = [
        Switch(
            at, "switch", "told", n, 4000 << n, 31.0, 1.5 + 0.1 * n if n else None, 1.6 + 0.1 * n
        )
        for n, at in enumerate(SWITCHED, 1)
    ]
    stopped = Switch(306.0, "stopped", "adaptation stopped: " + "no <memory> left " * 9, len(heads))
    document["adaptation"] = {"head": len(heads), "events": [asdict(e) for e in [*heads, stopped]]}
    store.put_replace("_job/metrics.json", json.dumps(document).encode())


def test_it_is_small(report: Path) -> None:
    text = report.read_text("utf-8")
    assert len(text.encode()) < MOST_BYTES
    assert f"rows out of {ROWS:,}" in text
    for title in (
        "Throughput",
        "Adaptation",
        "Accepted by position",
        "Tokens a target pass, over time",
        "Drafts chosen, by rows in the batch",
        "Slots in use",
        "Tokens a target pass, by stage",
        "Where the time went",
        "Completion length",
        "Workers",
        "Quarantined rows by reason",
        "What happened",
        "Slowest rows",
        "Lowest acceptance",
        "Samples",
        "Configuration",
    ):
        assert f"<h2>{title}</h2>" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_real_browser_shows_it_at_once_on_every_screen(report: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as port:
        asyncio.run(look(report, port))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_page_with_faults_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<div style='width: 999px'>wide</div><script>nothing.at.all</script>")

    async def faults(port: str) -> None:
        async with browser_tab(port) as tab:
            await tab.open(page)
            assert (await on_screen(tab, 390, dark=False))[0] > 0
            assert "nothing is not defined" in tab.complaints[0]

    with browser(tmp_path / "profile") as port:
        asyncio.run(faults(port))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_every_word_of_a_plot_can_be_read_on_every_screen(report: Path, tmp_path: Path) -> None:
    async def read(port: str) -> None:
        async with browser_tab(port) as tab:
            await tab.open(report)
            for width, dark in SCREENS:
                await on_screen(tab, width, dark=dark)
                words = await tab.value(WORDS)
                heads = [word for _, word, *_ in words if word.startswith("head ")]
                assert heads == [f"head {n}" for n in (1, 2, 4, 5, 6)], "the third has no room"
                assert list(unreadable(words)) == [], f"width {width}, dark {dark}"

    with browser(tmp_path) as port:
        asyncio.run(read(port))


def test_words_that_cannot_be_read_would_be_found() -> None:
    plot, ink, ground = [0.0, 0.0, 100.0, 50.0], "rgb(20, 20, 20)", "rgb(255, 255, 255)"
    good: Word = ("p", "a", [1.0, 1.0, 20.0, 9.0], ink, ground, plot)
    assert list(unreadable([good, ("q", *good[1:])])) == []
    assert list(unreadable([good, ("p", "b", [18.0, 3.0, 30.0, 9.0], ink, ground, plot)]))
    assert list(unreadable([("p", "a", [90.0, 1.0, 109.0, 9.0], ink, ground, plot)]))
    assert list(unreadable([("p", "a", good[2], "rgb(220, 220, 220)", ground, plot)]))


def unreadable(words: list[Word]) -> Iterator[str]:
    """Say which words are out of their plot, too pale, or one over another."""
    for plot, word, (left, top, right, bottom), colour, ground, frame in words:
        if (
            left < frame[0] - 1
            or top < frame[1] - 1
            or right > frame[2] + 1
            or bottom > frame[3] + 1
        ):
            yield f"{plot}: {word!r} is cut off"
        if contrast(colour, ground) < CONTRAST:
            yield f"{plot}: {word!r} is pale: {colour} on {ground}"
    for (plot, word, a, *_), (other_plot, other, b, *_) in combinations(words, 2):
        wide, high = (min(a[i + 2], b[i + 2]) - max(a[i], b[i]) for i in (0, 1))
        # Boxes of letters have some air above and below.
        if plot == other_plot and wide > 1 and high > 3:
            yield f"{plot}: {word!r} and {other!r} lie over each other"


def contrast(colour: str, ground: str) -> float:
    """Return the contrast of two colours as WCAG counts it, from 1 to 21."""
    light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").rstrip(")").split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


async def look(report: Path, port: str) -> None:
    async with browser_tab(port) as tab:
        # The least of three: a busy machine may halt the browser for a while.
        seconds = [await opening_s(tab, report) for _ in range(3)]
        assert 0 < min(seconds) < MOST_SECONDS
        seen = [await on_screen(tab, width, dark=dark) for width, dark in SCREENS]
        assert tab.complaints == []
        assert {url.partition(":")[0] for url in tab.requests} <= {"file", "data"}
    for (width, dark), (overflow, colour, drawings) in zip(SCREENS, seen, strict=True):
        assert overflow <= 0, f"{overflow} pixels too wide on a screen of {width}"
        assert (brightness(colour) < 64) == dark
        assert drawings == [True] * len(drawings)
        assert len(drawings) > 6


async def opening_s(tab: Tab, report: Path) -> float:
    """Return the seconds from asking for the page to the end of its loading."""
    await tab.open(report)
    found: float = await tab.value("performance.getEntriesByType('navigation')[0].duration / 1000")
    return found


async def on_screen(tab: Tab, width: int, *, dark: bool) -> tuple[int, str, list[bool]]:
    """Return pixels beyond the screen, the page's colour, and whether each drawing is drawn."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    await tab.call("Emulation.setDeviceMetricsOverride", **size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    await tab.call("Emulation.setEmulatedMedia", features=[scheme])
    overflow = await tab.value(f"document.documentElement.scrollWidth - {width}")
    colour = await tab.value("getComputedStyle(document.body).backgroundColor")
    drawn = "Array.from(document.querySelectorAll('svg'), s => s.clientHeight > 60)"
    return overflow, colour, await tab.value(drawn)


def brightness(colour: str) -> float:
    parts = colour.removeprefix("rgb(").removesuffix(")").split(",")
    return sum(map(int, parts[:3])) / 3
