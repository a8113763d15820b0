"""The templates and expressions of a stage: Jinja over the columns of one row, in a sandbox.

An unknown name is an error before anything runs; what a row's values make impossible is its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import TemplateAssertionError
from jinja2.meta import find_undeclared_variables

from eagle_batch.data.conversations import conversation, encodable
from eagle_batch.data.sandbox import Sandbox, plain
from eagle_batch.errors import ConfigError, Reason, RequestError
from eagle_batch.pipeline import ROW_VARIABLE, TURN_VARIABLE, Judge, Stage
from eagle_batch.pipeline.loops import loops
from eagle_batch.pipeline.problems import suggestion

_MOST_NAMES = 20
_BRACES = re.compile(r"\s*\{\{(.*)\}\}\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Text:
    """One template or expression as the file has it."""

    #: Where it stands in its stage: "messages.0.content", "when".
    key: str
    text: str
    role: str = ""
    is_expression: bool = False
    #: Whether it runs after the stage, whose text it then sees.
    after: bool = False


@dataclass(slots=True)
class _Compiled:
    """One template or expression that can run."""

    source: _Text
    #: Sees names, for checks.
    tree: nodes.Template
    template: Template | None = None
    expression: Callable[[Mapping[str, object]], object] | None = None


class StageTemplate:
    """The templates and expressions of one stage, compiled."""

    def __init__(self, index: int, stage: Stage, last_seen: int | None = None) -> None:
        """Compile the stage; raises ConfigError with everything that is not valid Jinja.

        In a loop, `last_seen` is the loop's last stage: its texts are those of the turn before.
        """
        self.index = index
        self.stage = stage
        self._last_seen = last_seen
        self._sandbox = Sandbox()
        self._compiled: dict[str, _Compiled] = {}
        problems: list[str] = []
        for text in _texts(stage):
            try:
                self._compiled[text.key] = self._compile(text)
            except ConfigError as error:
                problems.extend(error.problems)
        if problems:
            raise ConfigError(problems)

    def is_chat(self, judge: int | None = None) -> bool:
        """Whether the texts are messages for a chat template, rather than one raw prompt."""
        return self._prompt(judge).prompt is None

    def problems(self, columns: Collection[str], stages: Sequence[str]) -> list[str]:
        """Return one line for each name that is neither a column nor a stage that it can see."""
        return [
            self._unknown(compiled.source.key, name, known, stages)
            for compiled in self._compiled.values()
            for known in [self._known(compiled.source, columns, stages)]
            for name in sorted(
                (self._names(compiled.tree) - {ROW_VARIABLE}) | set(row_keys(compiled.tree, known))
            )
            if name not in known
        ]

    def _known(self, text: _Text, columns: Collection[str], stages: Sequence[str]) -> set[str]:
        if self._last_seen is not None:
            return {*columns, *stages[: self._last_seen + 1], TURN_VARIABLE}
        return {*columns, *stages[: self.index + text.after]}

    def begins(self, columns: Mapping[str, object], stages: Sequence[str]) -> dict[str, object]:
        """Return what the first stage sees of a row; in a loop, nothing was written before."""
        if self._last_seen is None:
            return dict(columns)
        nothing = dict.fromkeys(stages[: self._last_seen + 1])
        return {TURN_VARIABLE: 1, **columns, **nothing}

    def columns(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that the stage uses; all of them where that cannot be known."""
        if any(validator.python is not None for validator in self.stage.validators):
            return tuple(columns)
        used: set[str] = set()
        for compiled in self._compiled.values():
            tree = compiled.tree
            used |= find_undeclared_variables(tree)
            used |= set(row_keys(tree, columns))
            if uses_whole_row(tree, columns):
                return tuple(columns)
        return tuple(name for name in columns if name in used)

    def render(
        self, values: Mapping[str, object], judge: int | None = None
    ) -> tuple[dict[str, Any], ...]:
        """Return the messages of one row as {"role", "content"}; a raw prompt has the role "".

        The turns of a conversation may have further keys.

        They are those of the stage, or of the judge at that place of its validators. Raises
        RequestError with the reason template_error, or invalid_text for text that has no UTF-8
        form.
        """
        prefix = "" if judge is None else f"validators.{judge}.judge."
        keys = [text.key for text in _prompt_texts(prefix, self._prompt(judge))]
        context = _context(values)
        messages: list[dict[str, Any]] = []
        for key in keys:
            source = self._compiled[key].source
            if source.is_expression:
                messages += conversation(self.evaluate(key, values), self._key(key))
            else:
                messages.append({"role": source.role, "content": self._render(key, context)})
        return tuple(messages)

    def prefill(self, values: Mapping[str, object]) -> str | None:
        """Return how the assistant's answer begins; raises as `render` does."""
        return self._render("prefill", _context(values)) if "prefill" in self._compiled else None

    def evaluate(self, key: str, values: Mapping[str, object]) -> object:
        """Return the value of an expression, such as `when`; nulls of the row are NULL.

        Raises RequestError with the reason template_error.
        """
        expression = self._compiled[key].expression
        assert expression is not None
        return self._guarded(key, lambda: self._sandbox.evaluate(expression, _context(values)))

    def holds(self, key: str, values: Mapping[str, object]) -> bool:
        """Return whether an expression is true; raises as `evaluate` does."""
        expression = self._compiled[key].expression
        assert expression is not None
        context = _context(values)
        found = self._guarded(key, lambda: bool(self._sandbox.evaluate(expression, context)))
        return bool(found)

    def _prompt(self, judge: int | None) -> Stage | Judge:
        if judge is None:
            return self.stage
        found = self.stage.validators[judge].judge
        assert found is not None
        return found

    def _render(self, key: str, context: Mapping[str, object]) -> str:
        template = self._compiled[key].template
        assert template is not None
        text = self._guarded(key, lambda: self._sandbox.render(template, context))
        return encodable(str(text), self._key(key))

    def _guarded(self, key: str, run: Callable[[], object]) -> object:
        try:
            return run()
        except Exception as error:
            # A template is code over foreign data: it can raise anything, and that is the row's.
            message = f"{self._key(key)}: {type(error).__name__}: {error}"
            raise RequestError(Reason.TEMPLATE_ERROR, message) from error

    def _compile(self, text: _Text) -> _Compiled:
        source = _without_braces(text.text) if text.is_expression else text.text
        try:
            if text.is_expression:
                expression = self._sandbox.compile_expression(source, undefined_to_none=False)
                compiled = _Compiled(text, self._sandbox.parse("{{ " + source + " }}"))
                compiled.expression = expression
            else:
                template = self._sandbox.from_string(source)
                compiled = _Compiled(text, self._sandbox.parse(source), template)
            self._refuse_unknown(compiled.tree)
        except TemplateError as error:
            raise ConfigError(self._not_valid(text, error)) from error
        except RecursionError as error:
            raise ConfigError(
                f"{self._key(text.key)}: the template is nested too deeply"
            ) from error
        return compiled

    def _not_valid(self, text: _Text, error: TemplateError) -> str:
        line = getattr(error, "lineno", None)
        place = f" in line {line} of the text" if line else ""
        what, example = (
            ("expression", "write it as in {% if ... %}, for example `answer | length > 20`")
            if text.is_expression
            else ("template", "write {{ column }} for a value of the row")
        )
        return f"{self._key(text.key)}: not a valid {what}{place}: {error.message}; {example}"

    def _refuse_unknown(self, tree: nodes.Template) -> None:
        """Find unknown filters and tests inside branches too, where Jinja waits until they run."""
        for filtered in tree.find_all(nodes.Filter):
            if filtered.name not in self._sandbox.filters:
                raise TemplateAssertionError(f"No filter named {filtered.name!r}.", filtered.lineno)
        for test in tree.find_all(nodes.Test):
            if test.name not in self._sandbox.tests:
                raise TemplateAssertionError(f"No test named {test.name!r}.", test.lineno)

    def _names(self, tree: nodes.Template) -> set[str]:
        return find_undeclared_variables(tree) - set(self._sandbox.globals)

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
    ends = {index: last for index, (_, last) in loops(stages).items()}
    for index, stage in enumerate(stages):
        try:
            compiled.append(StageTemplate(index, stage, ends.get(index)))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return tuple(compiled)


def _texts(stage: Stage) -> Iterator[_Text]:
    """Yield every template and expression of a stage."""
    if stage.when is not None:
        yield _Text("when", stage.when, is_expression=True)
    yield from _prompt_texts("", stage)
    if stage.prefill is not None:
        yield _Text("prefill", stage.prefill)
    for name, text in stage.sampling.by_row.items():
        yield _Text(f"sampling.by_row.{name}", text, is_expression=True)
    if stage.vote is not None and stage.vote.expression is not None:
        yield _Text("vote.expression", stage.vote.expression, is_expression=True, after=True)
    for number, validator in enumerate(stage.validators):
        key = f"validators.{number}"
        if validator.expression is not None:
            yield _Text(f"{key}.expression", validator.expression, is_expression=True, after=True)
        if validator.judge is not None:
            yield from _prompt_texts(f"{key}.judge.", validator.judge, after=True)
    if stage.repeat is not None and stage.repeat.until is not None:
        yield _Text("repeat.until", stage.repeat.until, is_expression=True, after=True)


def _prompt_texts(prefix: str, owner: Stage | Judge, *, after: bool = False) -> Iterator[_Text]:
    if owner.prompt is not None:
        yield _Text(f"{prefix}prompt", owner.prompt, after=after)
    for index, message in enumerate(owner.messages or ()):
        key = f"{prefix}messages.{index}"
        if message.turns is not None:
            yield _Text(f"{key}.turns", message.turns, is_expression=True, after=after)
        else:
            role, content = message.role or "", message.content or ""
            yield _Text(f"{key}.content", content, role, after=after)


def _without_braces(text: str) -> str:
    """Return an expression; people write it in braces too, as they do in prompts."""
    found = _BRACES.fullmatch(text)
    return found[1].strip() if found else text.strip()


def _context(values: Mapping[str, object]) -> dict[str, object]:
    shown = {name: plain(value) for name, value in values.items()}
    return shown if ROW_VARIABLE in shown else {**shown, ROW_VARIABLE: shown}


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
