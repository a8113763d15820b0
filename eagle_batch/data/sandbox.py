"""The sandbox that templates and expressions run in: bounded, and with nothing left to chance.

What is rendered depends on the row alone: random filters are not there, and a null that would be
printed is an error of its row. Attributes of Python are out of reach. A template that would loop
for ever or grow without end is stopped by counts, not by the clock, hence on every machine alike.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, cast

from jinja2 import StrictUndefined, Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

#: Turns of loops in one rendering, and calls of macros and methods, which count more.
MOST_STEPS = 500_000
CALL_STEPS = 10
#: Characters of one rendering, and of any text within it.
MOST_CHARACTERS = 10_000_000
#: Bits of a whole number that a template computes.
MOST_BITS = 4096

_COUNTED = "_counted"
_BOUNDED = "_bounded"
#: Filters that make a text as long as a number says.
_SIZED_FILTERS = ("batch", "center", "indent", "slice")
#: A width or precision of a format string that makes text without end, or one that data give.
_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{7,}|\*)|\{[^{}]*\d{7,}")


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


def is_null(value: object) -> bool:
    """Tell whether a value is a null, of Python or of a row."""
    return value is None or isinstance(value, _Null)


def plain(value: object) -> object:
    """Replace the nulls inside a value of the row."""
    if value is None:
        return NULL
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of a stage's templates; one rendering at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        """Take away what is random, and count what could go on for ever."""
        super().__init__(undefined=StrictUndefined, finalize=_printable)
        del self.globals["lipsum"], self.filters["random"]
        self.tests["none"] = is_null
        self.filters["tojson"] = _to_json
        for name in _SIZED_FILTERS:
            self.filters[name] = _without_large_numbers(self.filters[name])
        self.filters["format"] = _checked_format(self.filters["format"])
        self.filters[_COUNTED] = lambda items: _Counted(items, self.step)
        self.filters[_BOUNDED] = bounded
        self._steps = 0

    def render(self, template: Template, context: Mapping[str, object]) -> str:
        """Return the text; raises SecurityError where it is without end, and what it raises."""
        self._steps = 0
        pieces: list[str] = []
        size = 0
        for piece in template.generate(context):
            size += len(piece)
            _refuse_size(size)
            pieces.append(piece)
        return "".join(pieces)

    def evaluate(
        self, expression: Callable[[Mapping[str, object]], object], context: Mapping[str, object]
    ) -> object:
        """Return the value of a compiled expression; raises as `render` does."""
        self._steps = 0
        return expression(context)

    def step(self, steps: int = 1) -> None:
        """Count a turn of a loop, or a call."""
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise SecurityError(f"the template took more than {MOST_STEPS:,} steps")

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Bounds().visit(source), *args, **kwargs)

    def call(__self, __context: Any, __obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Count a call, and refuse one that makes a text as long as a large number says."""
        __self.step(CALL_STEPS)
        if isinstance(owner := getattr(__obj, "__self__", None), str):
            if __obj.__name__.startswith("format"):
                _refuse_width(owner)
            else:
                _refuse_large((*args, *kwargs.values()))
        if isinstance(__obj, LoopContext):
            args = tuple(_Counted(items, __self.step) for items in args)
        return bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute, unless the result would be too large to hold."""
        _refuse_operation(operator, left, right)
        return bounded(super().call_binop(context, operator, left, right))


class _Bounds(NodeTransformer):
    """Puts a counter around what a loop goes over, and a bound around joined texts."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _BOUNDED)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast("nodes.Expr", node), name, [], [], None, None, lineno=node.lineno)


class _Counted:
    """What a loop goes over; each turn is a step."""

    def __init__(self, items: Any, step: Callable[[], None]) -> None:
        self._items = items
        self._step = step

    def __iter__(self) -> Iterator[Any]:
        # A template that is wrong about a value shall hear so from the value itself.
        return self._turns(iter(self._items))

    def _turns(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def __len__(self) -> int:
        if not isinstance(self._items, Sized):
            raise TypeError("it has no length")
        return len(self._items)


def bounded(value: Any) -> Any:
    """Return a value; raises SecurityError for a text or list that is too long."""
    if isinstance(value, str | list | tuple):
        _refuse_size(len(value))
    return value


def _refuse_size(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise SecurityError(f"the text grew beyond {MOST_CHARACTERS:,} characters")


def _refuse_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for items, times in ((left, right), (right, left)):
            if isinstance(items, str | list | tuple) and isinstance(times, int):
                _refuse_size(len(items) * times)
    if operator == "%" and isinstance(left, str):
        _refuse_width(left)
    if operator in {"*", "**"} and isinstance(left, int) and isinstance(right, int):
        times = right if operator == "**" else 1
        if left.bit_length() * times + (right.bit_length() if times == 1 else 0) > MOST_BITS:
            raise SecurityError(f"the number grew beyond {MOST_BITS:,} bits")


def _refuse_large(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int):
            _refuse_size(abs(value))


def _refuse_width(text: str) -> None:
    if _WIDTH.search(text):
        raise SecurityError(
            f"the format {text[:40]!r} has too large a width, or one that data give"
        )


def _without_large_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _refuse_large((*args[1:], *kwargs.values()))
        return bounded(function(*args, **kwargs))

    return checked


def _checked_format(function: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(function)
    def checked(value: Any, *args: Any, **kwargs: Any) -> str:
        _refuse_width(str(value))
        return function(value, *args, **kwargs)

    return checked


def _printable(value: object) -> object:
    if value is None:
        return NULL
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("binary data would be printed; expected text or a number")
    return value


def _to_json(value: object, indent: int | None = None) -> str:
    """Print a value as JSON, as chat templates do: without HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_json_default)


def _json_default(value: object) -> Any:
    return None if isinstance(value, _Null) else str(value)
