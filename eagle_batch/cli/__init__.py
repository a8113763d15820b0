"""The command line: `eagle-batch`."""

from eagle_batch.cli.app import main

__all__ = ["main"]
