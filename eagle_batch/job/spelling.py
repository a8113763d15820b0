"""The tokens of a prompt, in which texts of the same row keep those they were generated as.

A conversation that goes on repeats a text that the row has. Spelled anew, that may be other tokens:
what is sampled is often not how the tokenizer would spell it. It keeps its own, as in any chat that
goes on, so that a slot holds all of the prompt but the new turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eagle_batch.job.spec import AddedToken, Tokenizer
from eagle_batch.stages.calls import Call, Record

#: Stands where a text was cut inside a character.
_CUT = "\ufffd"


class Speller:
    """Turns the prompts of a row into tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Few have a name: of those that end a turn, often none or one.
        added = {n: token for n, token in _added(tokenizer).items() if token.special}
        self._special_ids = frozenset((*tokenizer.all_special_ids, *added))
        named = tokenizer.all_special_tokens
        self._specials = (*named, *(token.content for token in added.values()))

    def prompt_ids(self, call: Call, records: Sequence[Record]) -> tuple[int, ...]:
        """Return a prompt's tokens; `records` are what the row has generated before."""
        latest_first = records[::-1]  # so that the latest of equals wins
        for record in sorted(latest_first, key=_reach, reverse=True):
            ids = self._continued(call, record)
            if ids:
                return ids
        return tuple(self._tokenizer.encode(call.prompt, add_special_tokens=call.special))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _continued(self, call: Call, record: Record) -> tuple[int, ...]:
        """Return the tokens of a prompt that goes on where a text ended; none where it does not.

        A special token has to follow the text: whatever else does may grow together with its end.
        """
        done = record.completion
        before = record.call.prompt + done.text
        rest = call.prompt[len(before) :]
        goes_on = call.prompt.startswith(before) and rest.startswith(self._specials)
        if not goes_on or call.special or record.call.special:
            return ()
        ids = done.token_ids
        ids = ids[:-1] if ids and ids[-1] in self._special_ids else ids
        # It may hold what the text lacks, or the text end at a stop string inside a token.
        if _CUT in done.text or self._special_ids & set(ids) or self.decode(ids) != done.text:
            return ()
        return (*done.prompt_ids, *ids, *self._tokenizer.encode(rest, add_special_tokens=False))


def _added(tokenizer: Tokenizer) -> Mapping[int, AddedToken]:
    try:
        return tokenizer.added_tokens_decoder
    except NotImplementedError:  # mistral-common's
        return {}


def _reach(record: Record) -> tuple[int, bool]:
    """Order records by how much of a prompt they may hold; of equals, by what the output shows.

    Candidates may have one text in different tokens.
    """
    return len(record.call.prompt) + len(record.completion.text), record.kept
