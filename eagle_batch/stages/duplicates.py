"""Which rows say the same as an earlier one, in the order in which they are shown.

A row is compared with earlier rows that were kept; of two that are alike the earlier one stays. So
what is kept depends on the order alone, which is that of the plan, whoever made the rows.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

from eagle_batch.data.words import runs, words
from eagle_batch.errors import ConfigError
from eagle_batch.pipeline import Deduplicate

#: Numbers of a text's signature, words of a run, and the seed of the hashes.
SIGNATURE, RUN, SEED = 128, 5, 1
#: A pair as alike as the threshold must be found: the bands look for pairs this much below it.
SLACK = 0.1


class Duplicates(Protocol):
    """What was kept so far."""

    def add(self, text: str) -> int | None:
        """Return the number of the kept text that this one repeats; None keeps it too.

        Texts that are kept are numbered from 0 in the order they come.
        """


def make_duplicates(section: Deduplicate) -> Duplicates:
    """Return the comparison that a pipeline asks for; raises ConfigError without its library."""
    return Same() if section.method == "exact" else Alike(section.threshold)


class Same:
    """Texts that are the same, character by character; sixteen bytes a text."""

    def __init__(self) -> None:
        self._seen: dict[bytes, int] = {}

    def add(self, text: str) -> int | None:
        """See Duplicates."""
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = self._seen.get(digest)
        if known is None:
            self._seen[digest] = len(self._seen)
        return known


class Alike:
    """Texts whose runs of words are largely the same, by MinHash with locality-sensitive hashing.

    Broder, "On the resemblance and containment of documents" (1997). A text of fewer words than a
    run is compared as a whole.
    """

    def __init__(self, threshold: float) -> None:
        """Begin with nothing; raises ConfigError without rensa."""
        self._rensa = _rensa()
        self._threshold = threshold
        self._kept: list[Any] = []
        self._index = self._rensa.RMinHashLSH(threshold, SIGNATURE, bands(threshold - SLACK))

    def add(self, text: str) -> int | None:
        """See Duplicates."""
        signature = self._rensa.RMinHash(SIGNATURE, SEED)
        found = words(text)
        signature.update(runs(found, RUN) or [" ".join(found)])
        for number in sorted(self._index.query(signature)):
            if self._kept[number].jaccard(signature) >= self._threshold:
                return int(number)
        self._index.insert(len(self._kept), signature)
        self._kept.append(signature)
        return None


def bands(alike: float) -> int:
    """Return the fewest bands of a signature that find most pairs which are as alike as this.

    With b bands of r numbers, a pair of similarity s is found with probability 1 - (1 - s^r)^b,
    whose steep part lies at (1/b)^(1/r).
    """
    choices: list[int] = [2**n for n in range(SIGNATURE.bit_length())]
    return next(b for b in choices if (1 / b) ** (b / SIGNATURE) <= alike or b == SIGNATURE)


def _rensa() -> Any:
    try:
        import rensa
    except ImportError as error:
        raise ConfigError(
            "deduplicate.method: minhash needs rensa; install it with: "
            "pip install 'eagle-batch[quality]'"
        ) from error
    return rensa
