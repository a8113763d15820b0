"""What single tokens say, by the tokenizer of a target; free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_batch.data.chat import model_folder


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model's folder; None where only transformers can read it."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.is_file() else None


class Spelling:
    """Tells the text of a token behind the one before it, which may decide about a space."""

    def __init__(self, model: str, revision: str | None) -> None:
        """Read the tokenizer of a target; raises ConfigError where there is no such model."""
        self._tokenizer = read_tokenizer(model_folder(model, revision))

    @property
    def known(self) -> bool:
        """Whether there is a tokenizer to ask."""
        return self._tokenizer is not None

    def text(self, token: int, before: int | None) -> str:
        """Return what a token says; U+FFFD stands for a part of a character."""
        if before is None:
            return self._decode(token)
        start, both = self._decode(before), self._decode(before, token)
        return both.removeprefix(start) if both.startswith(start) else self._decode(token)

    def _decode(self, *tokens: int) -> str:
        found: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return found
