"""Drafted spans are coloured on a terminal and marked elsewhere; the text stays what it is."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from eagle_batch.cli import main
from eagle_batch.job.store import Store
from eagle_batch.report.output import read_facts
from eagle_batch.report.rows import Query, find_rows, show_rows
from eagle_batch.report.spans import coloured, pieces, share_drafted
from tests.report.finished import finished


@given(st.lists(st.integers(0, 6), max_size=12))
def test_pieces_are_the_text_and_their_kinds_alternate(characters: list[int]) -> None:
    text = "".join(chr(97 + n % 26) for n in range(sum(characters)))
    found = list(pieces(text, characters))
    assert "".join(piece for piece, _ in found) == text
    assert all(piece for piece, _ in found)
    assert all(a[1] != b[1] for a, b in pairwise(found))
    drafted = sum(len(piece) for piece, drafted in found if drafted)
    assert drafted == sum(characters[::2])


def test_marks_stand_around_what_was_drafted() -> None:
    assert coloured("The sky is", [0, 3, 4, 3], colour=False).plain == "The\u2039 sky\u203a is"
    assert coloured("The sky is", [0, 3, 4, 3], colour=True).plain == "The sky is"
    assert share_drafted([0, 3, 4, 3]) == pytest.approx(0.4)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return finished(tmp_path_factory.mktemp("job"), ["tides"], output={"spans": True})


def shown(store: Store, **options: bool) -> str:
    facts = read_facts(store)
    out = io.StringIO()
    console = Console(file=out, width=100, **options)  # type: ignore[arg-type]
    show_rows(console, find_rows(store, facts, Query(limit=1)), facts)
    return out.getvalue()


def test_a_terminal_shows_colours_and_a_file_marks(store: Store) -> None:
    coloured = shown(store, force_terminal=True)
    assert "\x1b[32m" in coloured
    assert "\u2039" not in coloured
    marked = shown(store)
    assert "\x1b[" not in marked
    assert marked.count("\u2039") >= 2  # a span, and the legend
    assert "33% drafted" in marked


def test_spans_can_be_left_out(store: Store) -> None:
    assert "\u2039" in CliRunner().invoke(main, ["show", store.root]).stdout
    assert "\u2039" not in CliRunner().invoke(main, ["show", store.root, "--no-spans"]).stdout


def test_an_output_without_spans_shows_its_texts(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["show", finished(tmp_path, ["tides"]).root])
    assert result.exit_code == 0, result.output
    assert "drafted and accepted" not in result.stdout


def test_the_picture_in_the_docs_is_this_view(repository: Path) -> None:
    drawing = (repository / "docs" / "show.svg").read_text("utf-8").replace("&#160;", " ")
    for words in ("33% drafted", "drafted and accepted", "supplied by the target", "acceptance"):
        assert words in drawing
    assert "http" not in drawing.replace("http://www.w3.org", "")
