"""The words of a text, for comparing texts: small letters, no marks, every ideograph a word."""

from __future__ import annotations

import re
from collections.abc import Sequence

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+")


def words(text: str) -> list[str]:
    """Return the words of a text, in order."""
    return _WORD.findall(text.casefold())


def runs(found: Sequence[str], length: int) -> list[str]:
    """Return every run of so many words; none where there are fewer."""
    return [" ".join(found[n : n + length]) for n in range(len(found) - length + 1)]
