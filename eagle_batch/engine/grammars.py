"""Grammars of structured output: what may come next, one row at a time, on the host.

A thin layer over llguidance, free of torch, so that `validate` can refuse a grammar that does not
compile. A `Guide` answers for any path of tokens behind the row's text, which is what the nodes of
a draft tree ask.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_batch.engine.request import Structured
from eagle_batch.errors import ConfigError

#: How JSON is spaced: as Python writes it, and no other way. Free white space lets a small model
#: write blanks for ever. A schema may say otherwise under its key "x-guidance".
_JSON_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
Path = tuple[int, ...]
Bits = NDArray[np.uint8]


def grammar_problem(structured: Structured) -> str | None:
    """Return why a grammar cannot be compiled, on one line; None where it can."""
    from llguidance import LLMatcher

    try:
        text = _grammar_text(structured)
    except ValueError as error:
        return " ".join(str(error).split())
    failed, messages = LLMatcher.validate_grammar_with_warnings(text)
    return " ".join(" ".join(messages).split()) if failed else None


class Grammars:
    """Compiles grammars for one tokenizer and keeps what it compiled."""

    def __init__(self, tokenizer: Any, vocab: int, eos_ids: Sequence[int]) -> None:
        self._source = tokenizer
        self._vocab = vocab
        self._eos_ids = list(eos_ids)
        self._tokenizer: Any = None
        self._compiled: dict[Structured, Any] = {}

    def guide(self, structured: Structured) -> Guide:
        """Return a guide at the start of a grammar.

        Raises ConfigError where the grammar cannot be compiled, or the tokenizer or target cannot
        be guided.
        """
        if structured not in self._compiled:
            self._compiled[structured] = self._compile(structured)
        return Guide(self._compiled[structured].deep_copy(), self._vocab)

    def _compile(self, structured: Structured) -> Any:
        from llguidance import LLMatcher

        where = f"structured.{structured.kind}: cannot be compiled"
        problem = grammar_problem(structured)
        if problem:
            raise ConfigError(f"{where}: {problem}")
        matcher = LLMatcher(self._load(), _grammar_text(structured))
        if matcher.is_error():
            raise ConfigError(f"{where}: {' '.join(matcher.get_error().split())}")
        return matcher

    def _load(self) -> Any:
        """Return llguidance's tokenizer; it takes about a second to make."""
        if self._tokenizer is None:
            self._tokenizer = _guiding_tokenizer(self._source, self._vocab, self._eos_ids)
        return self._tokenizer


class Guide:
    """Where one row stands in its grammar."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher = matcher
        self._words = -(-vocab // 32)
        #: What was asked since the row last moved on.
        self._known: dict[Path, Bits | None] = {}

    @property
    def complete(self) -> bool:
        """Whether the text so far satisfies the grammar."""
        return bool(self._matcher.is_accepting()) and not self._matcher.is_error()

    def advance(self, tokens: Sequence[int]) -> None:
        """Move on by committed tokens; an end-of-sequence token has no place in a grammar."""
        self._matcher.try_consume_tokens(list(tokens))
        self._known.clear()

    def allowed(self, path: Path) -> Bits | None:
        """Return the tokens that may follow a path, packed bits `[ceil(V / 32) * 4]`.

        None where the path itself leaves the grammar: nothing behind it will ever be chosen.
        """
        if path not in self._known:
            self._known[path] = self._ask(path)
        return self._known[path]

    def _ask(self, path: Path) -> Bits | None:
        taken = self._matcher.try_consume_tokens(list(path))
        bits = np.zeros(self._words, np.int32)
        if taken == len(path) and not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._matcher.rollback(taken)
        return bits.view(np.uint8) if taken == len(path) else None


def _grammar_text(structured: Structured) -> str:
    from llguidance import LLMatcher

    if structured.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(structured.text, defaults=_JSON_SPACING)  # type: ignore[arg-type]
    if structured.kind == "regex":
        return LLMatcher.grammar_from_regex(structured.text)
    choices = " | ".join(json.dumps(choice) for choice in json.loads(structured.text))
    return LLMatcher.grammar_from_lark("start: " + choices)


def _guiding_tokenizer(source: Any, vocab: int, eos_ids: list[int]) -> Any:
    from llguidance import LLTokenizer

    if not eos_ids:
        raise ConfigError(
            "structured: the target names no end-of-sequence token to end a text with"
        )
    backend = getattr(source, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            f"structured: {type(source).__name__} is no fast tokenizer; expected a target with a "
            "tokenizer.json"
        )
    core = copy.copy(backend)
    core.no_padding()
    core.no_truncation()
    try:
        return LLTokenizer(core.to_str(), n_vocab=vocab, eos_token=eos_ids)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"structured: the target's tokenizer cannot be guided: {error}"
        ) from error
