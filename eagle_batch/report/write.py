"""What a job leaves beside its rows: `report.html` and the data set card `README.md`."""

from __future__ import annotations

from eagle_batch.report.card import CARD, render_card
from eagle_batch.report.output import Objects
from eagle_batch.report.progress import View
from eagle_batch.report.recorder import Recorder


def recorded(view: View, store: Objects) -> Recorder:
    """Return a view that, when it is closed, leaves report and card in the output it watched."""
    return Recorder(view, store, write_reports)


def write_reports(store: Objects, price: float | None = None) -> tuple[str, ...]:
    """Make report and card anew from what the output holds; returns their keys.

    `price` of one worker-hour, in any currency, adds the cost of a million tokens. Raises
    LedgerError where there is no job, StoreError where the store fails.
    """
    from eagle_batch.report.page import REPORT, render_report

    store.put_replace(REPORT, render_report(store, price).encode("utf-8", "replace"))
    store.put_replace(CARD, render_card(store).encode("utf-8", "replace"))
    return REPORT, CARD
