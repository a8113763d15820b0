"""A text in two kinds of spans: what was drafted, and what the target had to supply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from rich.text import Text

#: Colours on a terminal; elsewhere the drafted spans stand between marks.
DRAFTED, SUPPLIED = "green", "magenta"
OPEN, CLOSE = "\u2039", "\u203a"


def stage_spans(row: dict[str, Any], stage: str) -> list[int] | None:
    """Return the numbers of a stage's spans; None where the output does not have them."""
    for item in row.get("spans") or []:
        if item["stage"] == stage:
            return list(item["characters"])
    return None


def pieces(text: str, characters: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """Yield the text in pieces, each with whether it was drafted; neighbours differ in that."""
    begin, held, kind = 0, "", False
    for count, drafted in zip(characters, cycle((True, False)), strict=False):
        piece = text[begin : begin + count]
        begin += count
        if piece and drafted != kind and held:
            yield held, kind
            held = ""
        if piece:
            held, kind = held + piece, drafted
    if held:
        yield held, kind


def coloured(text: str, characters: Sequence[int], *, colour: bool) -> Text:
    """Return a text with its drafted spans in a colour, or between marks."""
    shown = Text()
    for piece, drafted in pieces(text, characters):
        if colour:
            shown.append(piece, style=DRAFTED if drafted else SUPPLIED)
        else:
            shown.append(f"{OPEN}{piece}{CLOSE}" if drafted else piece)
    return shown


def legend(*, colour: bool) -> Text:
    """Return the line that says what the colours or marks mean."""
    if not colour:
        return Text(f"{OPEN}drafted and accepted{CLOSE}, supplied by the target")
    drafted, supplied = ("drafted and accepted", DRAFTED), ("supplied by the target", SUPPLIED)
    return Text.assemble(drafted, ", ", supplied)


def share_drafted(characters: Sequence[int]) -> float:
    """Return the share of the characters that was drafted."""
    total = sum(characters)
    return sum(characters[::2]) / total if total else 0.0
