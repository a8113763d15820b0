"""The speed-up that acceptance and costs let expect, in words, beside the one that was measured.

A round of a draft yields L tokens a row and costs d + v plain passes of the target, d for drafting
and v for verifying. It makes L / (d + v) times the tokens of plain decoding in the same time. What
is measured also holds prefill, the host's work, and a batch that empties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Account:
    """One draft at one batch size, beside plain decoding."""

    batch: int
    draft: str
    #: Share of the rounds that accepted at least 1, 2, ... drafted tokens.
    accepted_at: tuple[float, ...]
    #: Tokens that a row gains in a round, the bonus token included.
    tokens: float
    #: Cost of a round in plain passes.
    drafting: float
    verifying: float
    measured: float
    #: Share of the time that was neither drafting nor verifying.
    beside: float

    @property
    def expected(self) -> float:
        """Speed-up by the formula."""
        return self.tokens / (self.drafting + self.verifying)

    @property
    def needed(self) -> float:
        """Tokens of a round from which on the draft would pay."""
        return self.drafting + self.verifying


def accounts(records: Sequence[dict[str, Any]]) -> list[Account]:
    """Return the account of every draft in the results of `bench --json`."""
    plain = {record["batch"]: record for record in records if record["draft"] == "plain"}
    return [
        _account(record, plain[record["batch"]])
        for record in records
        if record["draft"] != "plain" and plain[record["batch"]]["verify_ms"]
    ]


def _account(record: dict[str, Any], plain: dict[str, Any]) -> Account:
    beside = record["prefill_s"] + record["host_s"]
    return Account(
        batch=record["batch"],
        draft=record["draft"],
        accepted_at=tuple(record["accepted_at"]),
        tokens=record["acceptance_length"],
        drafting=record["draft_ms"] / plain["verify_ms"],
        verifying=record["verify_ms"] / plain["verify_ms"],
        measured=record["ratio"],
        beside=beside / record["seconds"] if record["seconds"] else 0.0,
    )


def explain(account: Account) -> Iterator[str]:
    """Yield the lines of one account."""
    yield f"batch {account.batch}, {account.draft}"
    shares = " + ".join(f"{rate:.2f}" for rate in account.accepted_at)
    whole = f"1 + {shares} = " if abs(1 + sum(account.accepted_at) - account.tokens) < 0.02 else ""
    yield f"  a round yields   {whole}{account.tokens:.2f} tokens a row"
    cost = f"{account.drafting:.2f} drafting + {account.verifying:.2f} verifying"
    yield f"  a round costs    {cost} = {account.needed:.2f} plain passes"
    formula = f"{account.tokens:.2f} / {account.needed:.2f} = {account.expected:.2f}"
    yield f"  expected         {formula} times plain decoding"
    rest = f"{account.beside:.0%} of the time was prefill and host"
    yield f"  measured         {account.measured:.2f}; {rest}"
    if account.expected < 1:
        missing = account.needed - account.tokens
        yield f"  to pay, a round must yield {missing:.2f} tokens more, or cost as much less"
