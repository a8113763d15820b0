"""Prompt templates: Jinja over the columns of one row, in a sandbox, with nothing left to chance.

The rendered text depends on the row alone: random filters are not there, an unknown name is an
error before anything runs, and a null that would be printed is an error of its row.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, nodes
from jinja2.exceptions import TemplateAssertionError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eagle_batch.errors import ConfigError, Reason, RequestError
from eagle_batch.pipeline import ROW_VARIABLE, Stage
from eagle_batch.pipeline.problems import suggestion

_MOST_NAMES = 20


class _Null:
    """A null of the row: false, equal to none, and an error wherever it would become text."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _Null)

    def __hash__(self) -> int:
        return hash(None)

    def __str__(self) -> str:
        raise TypeError("a null value would be printed; test it with {% if %} or give a default")

    __repr__ = __str__
    __format__ = __str__  # type: ignore[assignment]


NULL = _Null()


@dataclass(frozen=True, slots=True)
class _Part:
    """One template of a stage."""

    #: Where it stands: "messages.0.content" or "prompt".
    key: str
    role: str
    template: Template


class StageTemplate:
    """The templates of one stage, compiled."""

    def __init__(self, index: int, stage: Stage) -> None:
        """Compile the stage; raises ConfigError with every template that is not valid Jinja."""
        self.index = index
        self.stage = stage
        self._environment = environment()
        self._trees = {key: self._parse(key, text) for key, _, text in _texts(stage)}
        self._parts = tuple(
            _Part(key, role, self._environment.from_string(text))
            for key, role, text in _texts(stage)
        )

    @property
    def is_chat(self) -> bool:
        """Whether the texts are messages for a chat template, rather than one raw prompt."""
        return self.stage.messages is not None

    def problems(self, columns: Collection[str], stages: Sequence[str]) -> list[str]:
        """Return one line for each name that is neither a column nor an earlier stage."""
        known = {*columns, *stages[: self.index]}
        return [
            self._unknown(key, name, known, stages)
            for key, tree in self._trees.items()
            for name in sorted((self._names(tree) - {ROW_VARIABLE}) | set(row_keys(tree, known)))
            if name not in known
        ]

    def columns(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that the templates use; all of them where that cannot be known."""
        used: set[str] = set()
        for tree in self._trees.values():
            used |= find_undeclared_variables(tree)
            used |= set(row_keys(tree, columns))
            if uses_whole_row(tree, columns):
                return tuple(columns)
        return tuple(name for name in columns if name in used)

    def render(self, values: Mapping[str, object]) -> tuple[dict[str, str], ...]:
        """Return the messages of one row as {"role", "content"}; a raw prompt has the role "".

        Raises RequestError with the reason template_error, or invalid_text for text that has no
        UTF-8 form.
        """
        shown = {name: plain(value) for name, value in values.items()}
        context = shown if ROW_VARIABLE in shown else {**shown, ROW_VARIABLE: shown}
        return tuple(
            {"role": part.role, "content": self._render(part, context)} for part in self._parts
        )

    def _render(self, part: _Part, context: Mapping[str, object]) -> str:
        try:
            text = part.template.render(context)
        except Exception as error:
            # A template is code over foreign data: it can raise anything, and that is the row's.
            message = f"{self._key(part.key)}: {type(error).__name__}: {error}"
            raise RequestError(Reason.TEMPLATE_ERROR, message) from error
        return encodable(text, self._key(part.key))

    def _parse(self, key: str, text: str) -> nodes.Template:
        try:
            tree = self._environment.parse(text)
            self._environment.from_string(text)
            self._refuse_unknown(tree)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            place = f" in line {line} of the text" if line else ""
            raise ConfigError(
                f"{self._key(key)}: not a valid template{place}: {error.message}; "
                "write {{ column }} for a value of the row"
            ) from error
        except RecursionError as error:
            raise ConfigError(f"{self._key(key)}: the template is nested too deeply") from error
        return tree

    def _refuse_unknown(self, tree: nodes.Template) -> None:
        """Find unknown filters and tests inside branches too, where Jinja waits until they run."""
        for filtered in tree.find_all(nodes.Filter):
            if filtered.name not in self._environment.filters:
                raise TemplateAssertionError(f"No filter named {filtered.name!r}.", filtered.lineno)
        for test in tree.find_all(nodes.Test):
            if test.name not in self._environment.tests:
                raise TemplateAssertionError(f"No test named {test.name!r}.", test.lineno)

    def _names(self, tree: nodes.Template) -> set[str]:
        return find_undeclared_variables(tree) - set(self._environment.globals)

    def _key(self, key: str) -> str:
        return f"stages.{self.index}.{key}"

    def _unknown(self, key: str, name: str, known: set[str], stages: Sequence[str]) -> str:
        if name in stages:
            own = name == self.stage.name
            why = "is this stage itself" if own else "is a later stage; move it before this one"
            return f"{self._key(key)}: found {name!r}, which {why}"
        shown = sorted(known)[:_MOST_NAMES]
        more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
        return (
            f"{self._key(key)}: found {name!r}, which is neither a column nor an earlier stage; "
            f"{suggestion(name, known)}expected one of {', '.join(shown)}{more}"
        )


def compile_stages(stages: Sequence[Stage]) -> tuple[StageTemplate, ...]:
    """Compile all stages; raises ConfigError with the problems of all of them."""
    compiled: list[StageTemplate] = []
    problems: list[str] = []
    for index, stage in enumerate(stages):
        try:
            compiled.append(StageTemplate(index, stage))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return tuple(compiled)


def encodable(text: str, where: str) -> str:
    """Return the text; raises RequestError (invalid_text) if it has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{where}: character {error.start} is half of a character (a lone surrogate)"
        raise RequestError(Reason.INVALID_TEXT, message) from error
    return text


def environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox of templates and expressions."""
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=_printable)
    del environment.globals["lipsum"], environment.filters["random"]
    environment.tests["none"] = lambda value: value is None or isinstance(value, _Null)
    environment.filters["tojson"] = _to_json
    return environment


def _texts(stage: Stage) -> Iterator[tuple[str, str, str]]:
    if stage.prompt is not None:
        yield "prompt", "", stage.prompt
    for index, message in enumerate(stage.messages or ()):
        yield f"messages.{index}.content", message.role, message.content


def _printable(value: object) -> object:
    if value is None:
        return NULL
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("binary data would be printed; expected text or a number")
    return value


def plain(value: object) -> object:
    """Replace the nulls inside a value of the row."""
    if value is None:
        return NULL
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _to_json(value: object, indent: int | None = None) -> str:
    """Print a value as JSON, as chat templates do: without HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_json_default)


def _json_default(value: object) -> Any:
    return None if isinstance(value, _Null) else str(value)


def row_keys(tree: nodes.Template, names: Collection[str]) -> Iterator[str]:
    """Yield the constant keys of `row["..."]` and `row.name`, unless a column is named row."""
    if ROW_VARIABLE in names:
        return
    for node in tree.find_all(nodes.Getitem):
        if _is_row(node.node) and isinstance(node.arg, nodes.Const):
            yield str(node.arg.value)
    for attribute in tree.find_all(nodes.Getattr):
        if _is_row(attribute.node) and not hasattr(dict, attribute.attr):
            yield attribute.attr


def uses_whole_row(tree: nodes.Template, names: Collection[str]) -> bool:
    """Tell whether `row` is used other than by constant keys."""
    if ROW_VARIABLE in names:
        return False
    uses = sum(_is_row(node) for node in tree.find_all(nodes.Name))
    return uses > len(list(row_keys(tree, names)))


def _is_row(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == ROW_VARIABLE
