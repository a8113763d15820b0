"""What a report is made of: cards with plots and tables."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    number: bool = False
    text: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts."""

    head: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Card:
    """One part of the page."""

    title: str
    note: str = ""
    svg: Markup | None = None
    #: What the plot shows, for those who do not see it.
    alt: str = ""
    table: Table | None = None
    wide: bool = False


def svg(markup: str) -> Markup:
    """Return a drawing as markup that a template does not escape."""
    return Markup(markup)  # noqa: S704 - drawn by us; matplotlib escapes every label
