"""`push`: an output, proved whole, becomes a data set of the Hugging Face hub.

Rows go first, in commits of a few shards; the card that says how to load them goes last.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_batch.errors import ConfigError, LedgerError, StoreError
from eagle_batch.job.ledger import PIPELINE
from eagle_batch.job.objects import DATA, ERRORS
from eagle_batch.job.store import Store, open_store
from eagle_batch.job.verify import verify

PREFIX = "hf://datasets/"
#: Objects of one commit; they are held in memory while it is made.
MOST_OBJECTS = 25
MOST_BYTES = 512 << 20
#: What goes last: the card, and what it refers to.
LAST = ("report.html", PIPELINE, "README.md")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Destination:
    """A data set of the hub."""

    repo: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> Destination:
        """Read `hf://datasets/owner/name[@revision]`; raises ConfigError for anything else."""
        inner, _, revision = text.rstrip("/").removeprefix(PREFIX).partition("@")
        if not text.startswith(PREFIX) or inner.count("/") != 1 or not all(inner.split("/")):
            raise ConfigError(f"{text}: expected {PREFIX}OWNER/NAME, or {PREFIX}OWNER/NAME@BRANCH")
        return cls(inner, revision or None)


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push did."""

    url: str
    objects: int
    bytes: int


def push(
    output: str | Store,
    destination: str,
    *,
    private: bool = False,
    say: Callable[[str], None] = lambda text: None,  # noqa: ARG005 - silence
) -> Pushed:
    """Verify an output, then upload it; the same call again uploads what is missing.

    Raises LedgerError where the output is not whole or the data set holds rows of something else,
    ConfigError for a destination that is none, StoreError where the hub refuses.
    """
    place = Destination.parse(destination)
    store = open_store(output) if isinstance(output, str) else output
    sizes = _verified(store)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(place.repo, repo_type="dataset", private=private, exist_ok=True)
        there = _there(api, place)
        _refuse_strangers(place, there, sizes)
        for keys in _commits(sizes):
            _commit(api, place, store, keys)
            say(f"{len(keys)} objects up to {keys[-1]}")
        _compare(place, _there(api, place), sizes)
    except (HfHubHTTPError, OSError) as error:
        said = str(error).strip().partition("\n")[0]
        raise StoreError(
            f"{PREFIX}{place.repo}: cannot push: {said}; log in with `hf auth login` or HF_TOKEN, "
            "and push again: what is there already is not sent twice"
        ) from error
    url = f"{api.endpoint}/datasets/{place.repo}"
    return Pushed(url, len(sizes), sum(sizes.values()))


def _verified(store: Store) -> dict[str, int]:
    """Return the size of each object that is to be pushed, in the order of the push."""
    report = verify(store)
    if not report.ok:
        shown = "; ".join(str(finding) for finding in report.findings[:_SHOWN])
        raise LedgerError(
            f"{store.name}: not whole, hence not pushed ({len(report.findings)} findings: "
            f"{shown}); see `eagle-batch verify`"
        )
    data, errors = store.list(DATA), store.list(ERRORS)
    rows = dict(sorted(data.items())) | (dict(sorted(errors.items())) if report.quarantined else {})
    return rows | {key: len(store.get(key) or b"") for key in LAST if store.get(key) is not None}


def _there(api: Any, place: Destination) -> dict[str, int]:
    """Return the files of the data set, with their sizes."""
    tree = api.list_repo_tree(
        place.repo, recursive=True, repo_type="dataset", revision=place.revision
    )
    return {item.path: item.size for item in tree if hasattr(item, "size")}


def _refuse_strangers(place: Destination, there: dict[str, int], ours: dict[str, int]) -> None:
    """Rows that this output has not would be loaded together with its own."""
    strangers = [
        path for path in there if path.startswith((f"{DATA}/", f"{ERRORS}/")) and path not in ours
    ]
    if strangers:
        shown = ", ".join(strangers[:_SHOWN])
        raise LedgerError(
            f"{PREFIX}{place.repo}: holds {len(strangers)} objects that this output has not "
            f"({shown}); push to a data set of its own, or remove them first"
        )


def _commits(sizes: dict[str, int]) -> Iterator[list[str]]:
    """Yield the objects of each commit; the card and what it refers to are the last one."""
    keys: list[str] = []
    for key in (key for key in sizes if key not in LAST):
        if keys and (
            len(keys) == MOST_OBJECTS or sum(map(sizes.__getitem__, [*keys, key])) > MOST_BYTES
        ):
            yield keys
            keys = []
        keys.append(key)
    if keys:
        yield keys
    last = [key for key in LAST if key in sizes]
    if last:
        yield last


def _commit(api: Any, place: Destination, store: Store, keys: Sequence[str]) -> None:
    from huggingface_hub import CommitOperationAdd

    operations = [
        CommitOperationAdd(path_in_repo=key, path_or_fileobj=io.BytesIO(store.get(key) or b""))
        for key in keys
    ]
    api.create_commit(
        place.repo,
        operations,
        commit_message=f"Add {keys[0]} ... {keys[-1]} with eagle-batch",
        repo_type="dataset",
        revision=place.revision,
    )


def _compare(place: Destination, there: dict[str, int], sizes: dict[str, int]) -> None:
    wrong = [key for key, size in sizes.items() if there.get(key) != size]
    if wrong:
        raise StoreError(
            f"{PREFIX}{place.repo}: after the push, {len(wrong)} objects are missing there or have "
            f"another size, first {wrong[0]}; push again"
        )
