"""Which characters of a text were drafted, and which the target had to supply.

A tokenizer is needed to tell, so it is told while the row is made; whoever reads the output needs
the text and these numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from eagle_batch.engine.request import Completion

Decode = Callable[[Sequence[int]], str]
#: What a decoder writes for a character of which bytes are missing.
BROKEN = "\N{REPLACEMENT CHARACTER}"


def span_lengths(completion: Completion, decode: Decode) -> tuple[int, ...]:
    """Return numbers of characters: drafted, then the target's own, for one pass after the other.

    Their sum is the length of the text. A character whose bytes lie in several tokens belongs to
    the last of them.
    """
    left = len(completion.text)
    lengths = []
    for count in _decoded(completion.token_ids, _ends(completion), decode):
        lengths.append(min(count, left))
        left -= lengths[-1]
    if lengths:
        lengths[-1] += left
    return tuple(lengths)


def _ends(completion: Completion) -> Iterator[int]:
    """Yield where each span ends, in tokens."""
    end, last = 0, len(completion.token_ids)
    for accepted in completion.accepted_by_pass:
        end += accepted
        yield min(end, last)
        end += 1
        yield min(end, last)


def _decoded(ids: Sequence[int], ends: Iterator[int], decode: Decode) -> Iterator[int]:
    """Yield the characters of each span, reading a few tokens at a time.

    A token alone may decode otherwise than behind others (spaces, bytes of one character), so each
    span is decoded together with the one before it.
    """
    before = begin = said = 0
    for end in ends:
        if end == begin:
            yield 0
            continue
        text = decode(ids[before:end])
        whole = text.rstrip(BROKEN) if end < len(ids) else text
        yield max(0, len(whole) - said)
        said = max(said, len(whole))
        if len(whole) == len(text):
            before, begin = begin, end
            said = len(decode(ids[before:begin]))
