"""`report.html`: one file that needs nothing else, made from what an output says of its job."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata, resources
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from eagle_batch.report.cards import make_cards
from eagle_batch.report.output import Objects, OutputFacts, read_facts, read_failures
from eagle_batch.report.parts import Card
from eagle_batch.report.progress import counted, duration
from eagle_batch.report.statistics import RowStatistics, read_statistics

REPORT = "report.html"


@dataclass(frozen=True, slots=True)
class Tile:
    """One number that matters."""

    value: str
    label: str


def render_report(store: Objects, price: float | None = None) -> str:
    """Return the page; `price` is that of one worker-hour.

    Raises LedgerError where there is no job, StoreError where the store fails.
    """
    facts = read_facts(store)
    statistics = read_statistics(store, facts)
    cards = make_cards(facts, statistics, read_failures(store, facts))
    return render(facts, statistics, cards, price)


def render(
    facts: OutputFacts, statistics: RowStatistics, cards: list[Card], price: float | None = None
) -> str:
    """Return the page of what was read; every text of the data is escaped."""
    templates = resources.files("eagle_batch.report") / "templates"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((templates / "report.html.j2").read_text("utf-8"))
    about = facts.runs[-1] if facts.runs else {}
    return template.render(
        name=facts.pipeline["name"],
        version=metadata.version("eagle-batch"),
        css=Markup((templates / "report.css").read_text("utf-8")),  # noqa: S704 - our own file
        complete=_state(facts) == "complete",
        state=_state(facts),
        subtitle=_subtitle(facts),
        tiles=_tiles(facts, price),
        cards=cards,
        samples=statistics.samples,
        command=shlex.join(map(str, about.get("command", []))),
        fingerprint=facts.fingerprint[:16],
        versions=_versions(about),
        pipeline=yaml.safe_dump(facts.pipeline, sort_keys=False, allow_unicode=True, width=100),
    )


def _state(facts: OutputFacts) -> str:
    """Return how the job ended; a run that died may have left its last state behind."""
    ended = str(facts.metrics["state"]) if facts.metrics else "not begun"
    if facts.complete and ended != "error_rate":
        return "complete"
    return ended.replace("_", " ")


def _subtitle(facts: OutputFacts) -> str:
    target, speculation = facts.pipeline["target"], facts.pipeline["speculation"]
    head, draft = speculation["head"], speculation.get("draft")
    drafts = "no head" if head is None else f"head {head}, {speculation['tree']} draft"
    if draft is not None:
        drafts = f"drafted by {draft}"
    parts = [f"{target['model']} in {target['dtype']}", drafts]
    parts.append(f"seed {facts.pipeline['seed']}")
    if facts.metrics is not None:
        ended = datetime.fromtimestamp(facts.metrics["updated"], UTC)
        parts.append(f"{ended:%Y-%m-%d %H:%M} UTC")
    return ", ".join(parts)


def _tiles(facts: OutputFacts, price: float | None) -> list[Tile]:
    tiles = [
        Tile(f"{facts.rows:,}", f"rows out of {facts.units:,}"),
        Tile(f"{facts.quarantined:,}", "rows quarantined"),
        *([Tile(f"{facts.dropped:,}", "rows left out on purpose")] if facts.dropped else []),
    ]
    if facts.metrics is None:
        return tiles
    engine, seconds = facts.metrics["engine"], facts.metrics["generating_seconds"]
    workers = counted(len(facts.metrics["workers"]), "worker")
    tiles += [
        Tile(f"{engine['completion_tokens']:,}", "tokens generated in the last run"),
        Tile(f"{facts.metrics['tokens_per_s']:,.1f}", "tokens a second"),
        Tile(f"{engine['acceptance_length']:.2f}", "tokens a row gains in one target pass"),
        Tile(f"{engine['occupancy']:.0%}", "of the slots in use"),
        Tile(duration(seconds), f"generating, {workers}"),
        Tile(_compact(_tokens_an_hour(facts.metrics)), _hour_label(facts.metrics, price)),
    ]
    return tiles


def _hour_label(document: dict[str, Any], price: float | None) -> str:
    """Name the unit that money is counted in and, where its price is known, what tokens cost."""
    device, speed = _device(document), _tokens_an_hour(document)
    label = f"tokens a {device}-hour"
    if price is None or not speed:
        return label
    return f"{label}: {1e6 * price / speed:,.2f} for a million tokens, at {price:g} a {device}-hour"


def _device(document: dict[str, Any]) -> str:
    devices = {worker["device"] for worker in document["workers"]}
    return "GPU" if devices == {"cuda"} else "worker"


def _tokens_an_hour(document: dict[str, Any]) -> float:
    """Return tokens by the hours that workers were at work, which is what is paid for."""
    seconds = sum(worker["pump_seconds"] for worker in document["workers"])
    return 3600 * float(document["engine"]["completion_tokens"]) / seconds if seconds else 0.0


def _compact(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / min(size, 1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{value:,.0f}"


def _versions(about: dict[str, Any]) -> str:
    packages = [f"{name} {version}" for name, version in about.get("packages", {}).items()]
    if about.get("python"):
        packages.append(f"Python {about['python']}")
    if about.get("platform"):
        packages.append(str(about["platform"]))
    commit = about.get("git_commit")
    return ", ".join(packages) + (f"; commit {commit[:12]}" if commit else "")
