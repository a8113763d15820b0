"""The account of a speed-up: yields, costs, what they let expect and what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from eagle_batch.bench.explain import accounts
from eagle_batch.cli import main


def record(draft: str, **values: Any) -> dict[str, Any]:
    base = {"batch": 2, "draft": draft, "ratio": 1.0, "seconds": 10.0, "acceptance_length": 1.0}
    times = {"prefill_s": 1.0, "host_s": 0.5, "draft_ms": 0.0, "verify_ms": 20.0}
    return base | times | {"accepted_at": []} | values


PLAIN = record("plain")
CHAIN = record(
    "chain:2",
    ratio=1.4,
    acceptance_length=2.0,
    accepted_at=[0.7, 0.3],
    draft_ms=4.0,
    verify_ms=24.0,
)


def explained(path: Path, records: list[dict[str, Any]]) -> Any:
    path.write_text(json.dumps({"results": records}))
    return CliRunner().invoke(main, ["heads", "explain", str(path)])


def test_the_formula_is_tokens_by_what_a_round_costs(tmp_path: Path) -> None:
    (account,) = accounts([PLAIN, CHAIN])
    assert account.expected == pytest.approx(2.0 / (4 / 20 + 24 / 20))
    result = explained(tmp_path / "b.json", [PLAIN, CHAIN])
    assert result.output.splitlines() == [
        "batch 2, chain:2",
        "  a round yields   1 + 0.70 + 0.30 = 2.00 tokens a row",
        "  a round costs    0.20 drafting + 1.20 verifying = 1.40 plain passes",
        "  expected         2.00 / 1.40 = 1.43 times plain decoding",
        "  measured         1.40; 15% of the time was prefill and host",
    ]


def test_a_draft_that_does_not_pay_is_told_what_is_missing(tmp_path: Path) -> None:
    result = explained(tmp_path / "b.json", [PLAIN, CHAIN | {"verify_ms": 46.0}])
    assert "must yield 0.50 tokens more" in result.output


def test_rates_that_do_not_add_up_are_not_added(tmp_path: Path) -> None:
    """A shape that is chosen while running does not draft at each depth in each round."""
    result = explained(tmp_path / "b.json", [PLAIN, CHAIN | {"acceptance_length": 1.4}])
    assert "  a round yields   1.40 tokens a row" in result.output


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"results": [{}]}', '{"results": [3]}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    result = CliRunner().invoke(main, ["heads", "explain", str(path)])
    assert result.exit_code == 2
    assert "expected what `eagle-batch bench PIPELINE --json FILE` writes" in result.output


def test_plain_decoding_alone_explains_nothing(tmp_path: Path) -> None:
    result = explained(tmp_path / "b.json", [PLAIN])
    assert (result.exit_code, "bench with a head" in result.output) == (2, True)
