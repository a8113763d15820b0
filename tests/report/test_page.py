"""The report is one page that needs nothing else, says what the output holds, and runs nothing."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from eagle_batch.cli import main
from eagle_batch.errors import LedgerError
from eagle_batch.job.adapting import Switch
from eagle_batch.job.store import Store, open_store
from eagle_batch.report import plots, statistics
from eagle_batch.report.card import render_card
from eagle_batch.report.metrics import JobMetrics
from eagle_batch.report.output import read_facts
from eagle_batch.report.page import render_report
from eagle_batch.report.statistics import read_statistics
from eagle_batch.report.write import write_reports
from tests.report.finished import EVIL, finished

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Collects the tags of a page and fails where one is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self._open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return finished(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def markup(store: Store) -> str:
    return render_report(store)


@pytest.fixture(scope="module")
def page(markup: str) -> Page:
    return Page(markup)


def test_it_needs_nothing_from_anywhere(page: Page, markup: str) -> None:
    assert "script" not in page.tags
    loads = [v for n, v in page.attributes if n in ("src", "href", "xlink:href")]
    assert all(value.startswith(("#", "data:")) for value in loads)
    assert "default-src 'none'" in markup
    assert "url(http" not in markup
    assert "@import" not in markup
    assert len(markup) < 1_000_000


def test_texts_of_the_data_are_shown_and_never_run(page: Page, markup: str) -> None:
    assert EVIL in page.text
    assert "<script>alert" not in markup


def test_ids_are_unique_so_that_plots_do_not_mix(page: Page) -> None:
    assert page.tags.count("svg") >= 4
    assert len(page.ids) == len(set(page.ids)) > 0


def test_colours_are_variables_so_that_the_page_has_a_dark_side(markup: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", markup, re.DOTALL)
    assert all("var(--" in drawing for drawing in drawings)
    assert not re.search(r"#0(10|a0)\d{3}", " ".join(drawings))
    assert "prefers-color-scheme: dark" in markup


def test_the_totals_are_those_of_the_output(page: Page, store: Store) -> None:
    # 5 rows x 2 samples, of which the long prompt's two are quarantined; 3 + 2 tokens a row.
    assert "8 rows out of 10" in page.text
    assert "2 rows quarantined" in page.text
    assert "complete" in page.text
    assert f"{read_facts(store).fingerprint[:16]}" in page.text


def test_what_went_wrong_is_told(page: Page) -> None:
    assert "prompt_too_long" in page.text
    assert "the prompt is too long" in page.text
    assert "worker 0 was lost, its shards go back: RuntimeError: the device is gone" in page.text
    assert "1 failure" in " ".join(value for _, value in page.attributes)


def test_one_triangle_marks_the_one_worker_that_was_lost(markup: str) -> None:
    (lanes,) = re.findall(r'aria-label="Workers: 2 workers.*?</svg>', markup, re.DOTALL)
    assert lanes.count('style="stroke: var(--bad)') == 1


def test_statistics_are_sums_over_the_parquet_rows(store: Store) -> None:
    found = read_statistics(store, read_facts(store))
    rows = pq.ParquetDataset(f"{store.root}/data").read().to_pylist()
    for index, stage in enumerate(found.stages):
        items = [row["generation"][index] for row in rows]
        assert stage.tokens == sum(item["completion_tokens"] for item in items)
        assert stage.passes == sum(item["target_passes"] for item in items)
        assert sorted(stage.lengths) == sorted(item["completion_tokens"] for item in items)
        assert stage.finishes == {"length": 8}
    assert len({(note.id, note.sample) for note in found.slowest}) == 8
    assert found.samples[0].inputs == {"topic": "tides", "n": "0"}


def test_a_job_of_one_token_a_row_and_no_error_has_a_report(tmp_path: Path) -> None:
    page = Page(render_report(finished(tmp_path, ["a"], samples=1)))
    assert "1 rows out of 1" in page.text


def test_an_output_without_metrics_timeline_or_rows_has_a_report(tmp_path: Path) -> None:
    store = finished(tmp_path, ["a", "b"])
    for key in ("_job/metrics.json", "_job/timeline.json", *store.list("data")):
        store.delete(key)
    for key in store.list("_job/commits"):
        store.delete(key)
    assert "0 rows out of 4" in Page(render_report(store)).text


def test_a_damaged_object_is_named(tmp_path: Path) -> None:
    store = finished(tmp_path, ["a"])
    store.put_replace("data/part-00000.parquet", b"PAR1")
    with pytest.raises(LedgerError, match=r"data/part-00000\.parquet is not a whole Parquet file"):
        render_report(store)
    store.put_replace("_job/metrics.json", b"{")
    with pytest.raises(LedgerError, match=r"_job/metrics\.json is damaged"):
        render_report(store)


def test_a_folder_without_a_job_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="expected the output folder"):
        write_reports(open_store(str(tmp_path)))


def test_of_very_many_shards_some_are_read_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "MOST_OBJECTS", 2)
    page = Page(render_report(finished(tmp_path, list("abcdefghijklmnop"))))
    assert "From 2 of 4 shards." in page.text


def test_a_drawing_of_nothing_is_a_drawing() -> None:
    assert "<svg" in plots.bars("x", [("one", 0.0)], ".2f")
    assert "<svg" in plots.over_time("x", [(0.0, 0.0), (1.0, 0.0)])
    assert "<svg" in plots.histogram("x", [("one", np.array([0, 0]))])
    assert "<svg" in plots.workers([(0.0, 0), (0.5, 0)], [0.1])


def point(at: int, passes: dict[str, int]) -> dict[str, Any]:
    """A point of a run that makes 7 tokens a second, 14 a pass, with 3 of 4 slots in use."""
    counts = {"tokens": at * 7, "units": 0, "round_tokens": 14 * at, "row_passes": 3 * at}
    return {"at": at, "slot_passes": 4 * at, "passes": passes} | counts


def test_hours_of_work_are_shown_in_hours(tmp_path: Path) -> None:
    store = finished(tmp_path, ["a", "b"])
    document = json.loads(store.get("_job/metrics.json") or b"")
    document["series"] = [point(at, {"plain": at}) for at in range(0, 40_000, 900)]
    store.put_replace("_job/metrics.json", json.dumps(document).encode())
    assert "hours" in Page(render_report(store)).text


def test_a_price_becomes_the_cost_of_a_million_tokens(tmp_path: Path) -> None:
    store = finished(tmp_path, ["a", "b"])
    document = json.loads(store.get("_job/metrics.json") or b"")
    document["engine"]["completion_tokens"] = 500_000
    document["workers"] = [document["workers"][0] | {"pump_seconds": 1800.0, "device": "cuda"}] * 2
    store.put_replace("_job/metrics.json", json.dumps(document).encode())
    # Two workers for half an hour each made half a million: a million costs two hours.
    result = CliRunner().invoke(main, ["report", store.root, "--price", "2.5"])
    assert result.exit_code == 0, result.output
    text = Page((Path(store.root) / "report.html").read_text("utf-8")).text
    assert "5.00 for a million tokens, at 2.5 a GPU-hour" in text


def test_the_drafts_that_were_chosen_are_shown_where_there_was_a_choice(tmp_path: Path) -> None:
    store = finished(tmp_path, ["a", "b"])
    document = json.loads(store.get("_job/metrics.json") or b"")
    assert "Drafts chosen" not in Page(render_report(store)).text
    kinds = [["4 4,1,4", 30], ["4 plain", 60], ["8 plain", 30]]
    document["engine"]["passes_by_rows"] = kinds
    store.put_replace("_job/metrics.json", json.dumps(document).encode())
    page = Page(render_report(store))
    labels = [value for _, value in page.attributes]
    assert "Drafts chosen, by rows in the batch: plain 75.0%, chain of 4 25.0%" in labels
    assert "3-4" in page.text
    assert "5-8" in page.text


def test_drafts_beyond_the_most_used_are_shown_together(tmp_path: Path) -> None:
    store = finished(tmp_path, ["a", "b"])
    document = json.loads(store.get("_job/metrics.json") or b"")
    few, many = [[[f"4 {n},1,{n}", 10] for n in range(1, last)] for last in (6, 10)]
    for kinds, others in ((few, False), (many, True)):
        document["engine"]["passes_by_rows"] = kinds
        store.put_replace("_job/metrics.json", json.dumps(document).encode())
        assert ("others" in Page(render_report(store)).words) == others


def test_phases_and_switches_of_a_run_are_told(tmp_path: Path) -> None:
    store = finished(tmp_path, ["a", "b"])
    document = json.loads(store.get("_job/metrics.json") or b"")
    document["series"] = [
        point(at, {"plain": min(at, 50), "4,4,8": max(0, at - 50)}) for at in range(0, 101, 2)
    ]
    store.put_replace("_job/metrics.json", json.dumps(document).encode())
    page = Page(render_report(store))
    assert "The draft of most passes changed once; dotted lines mark it." in page.text
    for words in ("with drafts", "plain", "Slots in use", "Tokens a target pass, over time"):
        assert words in page.text
    labels = [value for _, value in page.attributes]
    assert "Slots in use: from 75% to 75%" in labels


def test_workers_that_made_rows_of_another_s_shard_are_shown(tmp_path: Path) -> None:
    store = finished(tmp_path)
    assert "it made rows of a shard" not in Page(render_report(store)).text
    document = json.loads(store.get("_job/metrics.json") or b"")
    loan = {"worker": 1, "begun_at": 0.1, "ended_at": None, "state": "under way"}
    document["loans"] = [loan, loan | {"ended_at": 0.2, "state": "used"}]
    store.put_replace("_job/metrics.json", json.dumps(document).encode())
    assert "An orange stretch: it made rows of a shard" in Page(render_report(store)).text


def test_heads_that_took_over_are_marked_and_listed(tmp_path: Path) -> None:
    store = finished(tmp_path, ["a", "b"])
    document = json.loads(store.get("_job/metrics.json") or b"")
    document["series"] = [point(at, {"plain": at}) for at in range(0, 101, 2)]
    events = [
        Switch(40.0, "switch", "told", 1, 4100, 31.2, None, 1.61),
        Switch(70.0, "round", "told", 1, 8200, 30.0, 1.64, 1.63),
        Switch(90.0, "stopped", "adaptation stopped: no <memory>", 1),
    ]
    document["adaptation"] = {"head": 1, "events": [asdict(event) for event in events]}
    store.put_replace("_job/metrics.json", json.dumps(document).encode())
    page = Page(render_report(store))
    assert "head 1 took over 4,100 tokens 31 no head 1.61" in page.text
    assert "no gain, undone 8,200 tokens 30 1.64 1.63" in page.text
    assert "adaptation stopped: no <memory>" in page.text
    assert "A line with a number is a head that was trained beside the job" in page.text
    assert page.words.count("head 1") == 1, "one line in the plot"
    assert "trained beside the job, in `head/`" in render_card(store)
    assert JobMetrics.from_document(document).heads == 1


def test_drafted_parts_of_the_samples_are_shaded(tmp_path: Path) -> None:
    markup = render_report(finished(tmp_path, ["a"], output={"spans": True}))
    assert '<span class="drafted">' in markup
    bare = render_report(finished(tmp_path / "bare", ["a"]))
    assert '<span class="drafted">' not in bare


def test_the_page_of_columns_names_the_parts_of_a_report_and_fields_of_its_numbers(
    store: Store, repository: Path
) -> None:
    text = (repository / "docs" / "output-schema.md").read_text("utf-8")
    document = json.loads(store.get("_job/metrics.json") or b"")
    (table,) = re.findall(
        r"\| field \| what \|\n\|---\|---\|\n(\| `state`.*?)\n\n", text, re.DOTALL
    )
    for line in table.splitlines():
        _, names, what, _ = line.split("|")
        fields = re.findall(r"`(\w+)`", names)
        assert fields
        assert set(fields) <= document.keys()
        inner = document[fields[0]]
        within = inner[0] if isinstance(inner, list) else inner
        if isinstance(within, dict):
            assert set(re.findall(r"`(\w+)`", what)) <= within.keys()
    parts = re.findall(r"^\| ([A-Z][^|]*) \|", text.partition("## The report")[2], re.MULTILINE)
    titles = {title.strip() for part in parts for title in part.split(";")}
    source = "".join(
        path.read_text("utf-8")
        for path in (repository / "eagle_batch" / "report").rglob("*")
        if path.suffix in {".py", ".j2"}
    )
    assert len(titles) >= 12
    assert {title for title in titles if title not in source} == set()
