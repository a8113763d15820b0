"""The language of a text, by py3langid, whose model travels with it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any


def language_of(text: str) -> str:
    """Return the ISO 639-1 code of the most probable language; "und" where there are no letters."""
    if not any(character.isalpha() for character in text):
        return "und"
    return str(_identifier().classify(text)[0])


def unknown_languages(codes: Iterable[str]) -> list[str]:
    """Return the codes that are no known language; raises ImportError without py3langid."""
    known = set(_identifier().labels)
    return [code for code in codes if code not in known]


@functools.cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)
