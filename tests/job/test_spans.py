"""Spans of a text are what an oracle finds that decodes every prefix of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_batch.engine.request import Completion
from eagle_batch.job.spans import span_lengths
from tests.job.fake_job import load_job, run_in_process, write_job


def byte_decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def completion(ids: Sequence[int], accepted: Sequence[int], text: str) -> Completion:
    return Completion(
        request_id="r",
        token_ids=tuple(ids),
        text=text,
        finish_reason="length",
        prompt_tokens=1,
        target_passes=len(accepted),
        drafted=0,
        accepted=0,
        accepted_by_pass=tuple(accepted),
    )


def oracle(ids: Sequence[int], accepted: Sequence[int], text: str) -> tuple[int, ...]:
    """Decode the whole prefix at every end; a broken last character is not there yet."""
    ends, end = [], 0
    for count in accepted:
        ends += [min(end + count, len(ids)), min(end + count + 1, len(ids))]
        end += count + 1
    known, lengths = 0, []
    for place in ends:
        prefix = byte_decode(ids[:place])
        whole = len(prefix.rstrip("\ufffd")) if place < len(ids) else len(prefix)
        whole = min(whole, len(text))
        lengths.append(whole - known)
        known = whole
    lengths[-1] += len(text) - known
    return tuple(lengths)


@st.composite
def completions(draw: st.DrawFn) -> tuple[list[int], list[int], str]:
    text = draw(st.text(st.sampled_from("ab é\u20ac\U0001f600\n"), min_size=1, max_size=30))
    ids = list(text.encode())
    accepted: list[int] = []
    while sum(accepted) + len(accepted) < len(ids):
        accepted.append(draw(st.integers(0, 5)))
    # The last pass may end among its drafted tokens, and never has more than there are.
    accepted[-1] = min(accepted[-1], len(ids) - sum(accepted[:-1]) - len(accepted[:-1]))
    cut = draw(st.integers(0, len(text)))
    return ids, accepted, text[:cut]


@given(completions())
def test_spans_are_those_of_decoding_every_prefix(case: tuple[list[int], list[int], str]) -> None:
    ids, accepted, text = case
    found = span_lengths(completion(ids, accepted, text), byte_decode)
    assert found == oracle(ids, accepted, text)
    assert sum(found) == len(text)


def test_a_text_that_ends_among_its_drafted_tokens_has_no_last_token_of_the_target() -> None:
    assert span_lengths(completion(b"abcdef", (0, 2, 2), "abcdef"), byte_decode) == (
        *(0, 1),
        *(2, 1),
        *(2, 0),
    )


@pytest.mark.parametrize("wanted", [True, False])
def test_an_output_has_spans_where_the_pipeline_asks_for_them(tmp_path: Path, wanted: bool) -> None:
    run_in_process(load_job(write_job(tmp_path, ["a", "b"], output={"spans": wanted})))
    table = pq.ParquetDataset(tmp_path / "out" / "data").read()
    assert ("spans" in table.column_names) == wanted
    for row in table.to_pylist() if wanted else []:
        assert [item["stage"] for item in row["spans"]] == ["one", "two"]
        assert [sum(item["characters"]) for item in row["spans"]] == [12, 8]
        # Three tokens of four letters: the prefill's, a drafted one, the target's own.
        assert row["spans"][0]["characters"] == [0, 4, 4, 4]
