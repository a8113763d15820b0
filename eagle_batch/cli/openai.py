"""`openai-files`: an output as the output and error files of an OpenAI batch."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from pathlib import Path

import click


@click.command("openai-files", short_help="Write an OpenAI batch's output and error files.")
@click.argument("output")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--stage", help="Stage whose text is the answer; by default the last one.")
def openai_files(*, output: str, folder: Path, stage: str | None) -> None:
    """Write what an OUTPUT holds into FOLDER as output.jsonl and error.jsonl.

    Both have the form of an OpenAI batch's files. The samples of a row are its choices; a row of
    which any sample was quarantined is in error.jsonl. Where the job kept logprobs and token_ids,
    the choices have them, and the target's tokenizer is read.
    """
    from eagle_batch.job.ledger import read_identity
    from eagle_batch.job.openai_files import ERROR, OUTPUT, lines
    from eagle_batch.job.openai_logprobs import spelling_of
    from eagle_batch.job.store import open_store

    store = open_store(output)
    identity = read_identity(store)
    spelling, reason = spelling_of(identity.resolved)
    if reason:
        click.echo(f"logprobs are null: {reason}", err=True)
    found = lines(store, identity, stage, spelling)
    first = next(found, None)
    folder.mkdir(parents=True, exist_ok=True)
    counts = dict.fromkeys((OUTPUT, ERROR), 0)
    with ExitStack() as stack:
        files = {
            name: stack.enter_context((folder / name).open("w", encoding="utf-8"))
            for name in counts
        }
        for line in itertools.chain(() if first is None else (first,), found):
            files[line.file].write(line.text + "\n")
            counts[line.file] += 1
    for name, count in counts.items():
        click.echo(f"{folder / name}: {count:,} lines")
