"""`python -m eagle_batch` is `eagle-batch`."""

from eagle_batch.cli import main

main(prog_name="eagle-batch")
