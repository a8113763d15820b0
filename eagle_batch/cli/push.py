"""`push`: an output as a data set of the hub."""

from __future__ import annotations

import click


@click.command(short_help="Upload an output to the Hugging Face hub.")
@click.argument("output")
@click.argument("destination", metavar="hf://datasets/OWNER/NAME")
@click.option("--private", is_flag=True, help="Make the data set private, where it is new.")
def push(*, output: str, destination: str, private: bool) -> None:
    """Verify an OUTPUT, then upload it to the data set hf://datasets/OWNER/NAME.

    Its rows, its quarantined rows and its data set card are sent.

    The data set is made where there is none. A branch is named as OWNER/NAME@BRANCH. The token is
    that of `hf auth login`, or HF_TOKEN. The same command again sends only what is missing.
    """
    from eagle_batch.job.push import push as push_output

    done = push_output(output, destination, private=private, say=click.echo)
    click.echo(f"pushed {done.objects} objects, {done.bytes:,} bytes: {done.url}")
