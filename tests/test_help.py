"""Every help page fits a terminal of 80 columns, and says what each option and argument is."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from eagle_batch.cli import main

WIDTH = 80


def pages(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Yield (command, help page) of a command and of all below it."""
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from pages(inner, click.Context(inner, info_name=name, parent=context))


PAGES = dict(pages(main, click.Context(main, info_name="eagle-batch", terminal_width=WIDTH)))


@pytest.mark.parametrize("command", PAGES)
def test_a_help_page_fits_80_columns_and_begins_with_a_sentence(command: str) -> None:
    lines = PAGES[command].splitlines()
    assert max(map(len, lines)) <= WIDTH
    first = next(line.strip() for line in lines[1:] if line.strip())
    assert first[0].isupper()
    assert "..." not in first, "the summary is cut; give the command a short_help"


@pytest.mark.parametrize("command", PAGES)
def test_no_summary_in_a_list_of_commands_is_cut(command: str) -> None:
    listed = PAGES[command].partition("\nCommands:\n")[2]
    assert [line for line in listed.splitlines() if line.endswith("...")] == []


def commands(group: click.Command, above: str = "") -> Iterator[tuple[click.Command, str]]:
    """Yield every command with its own help and that of the groups above it."""
    text = f"{above}\n{group.help}"
    yield group, text
    if isinstance(group, click.Group):
        context = click.Context(group)
        for name in group.list_commands(context):
            inner = group.get_command(context, name)
            assert inner is not None
            yield from commands(inner, text)


@pytest.mark.parametrize(("command", "text"), list(commands(main)), ids=list(PAGES))
def test_every_option_and_argument_is_explained(command: click.Command, text: str) -> None:
    context = click.Context(command)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.opts
        else:
            assert parameter.make_metavar(context).strip("[].") in text
