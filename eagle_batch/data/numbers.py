"""Whether texts repeat, in eight bytes for each instead of the texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt


class Numbers:
    """Texts that were seen, as a number each."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.int64]] = []

    def add(self, texts: Sequence[str]) -> None:
        """Note some texts."""
        self._parts.append(np.fromiter(map(hash, texts), np.int64, len(texts)))

    def repeated(self, again: Callable[[], Iterable[Sequence[str]]], most: int) -> list[str]:
        """Return at most so many of the texts that came more than once, in their order.

        Numbers alone may agree by chance, so the texts they stand for are read again, by `again`.
        """
        numbers = np.sort(np.concatenate(self._parts)) if self._parts else np.zeros(0, np.int64)
        twice = set(numbers[1:][numbers[1:] == numbers[:-1]].tolist())
        seen: set[str] = set()
        found: dict[str, None] = {}
        for texts in again() if twice else ():
            for text in texts:
                if hash(text) in twice:
                    if text in seen:
                        found[text] = None
                    seen.add(text)
            if len(found) >= most:
                break
        return list(found)[:most]
