"""Reading YAML the way people mean it: no key twice, no surprises of YAML 1.1.

PyYAML follows YAML 1.1, where `no` is false, `12:30` is 750, `2024-01-01` is a date and `1e-3` is a
string. This loader keeps to the YAML 1.2 core schema (JSON's too) and refuses a key written twice.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from eagle_batch.errors import ConfigError

_CORE_SCHEMA: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
)


class _CoreLoader(yaml.SafeLoader):
    """A safe loader with its own scalars, which are added below."""

    def construct_core_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)

    def construct_text(self, node: yaml.ScalarNode) -> str:
        text = _join_surrogates(str(self.construct_scalar(node)))
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            problem = "text holds half of a character (a lone \\ud800-\\udfff escape)"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return text

    def construct_unique_mapping(self, node: yaml.MappingNode) -> Any:
        self._refuse_repeated_keys(node)
        return self.construct_yaml_map(node)

    def _refuse_repeated_keys(self, node: yaml.MappingNode) -> None:
        lines: dict[tuple[str, Any], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                continue
            name = (key.tag, key.value)
            if name in lines:
                problem = f"key {key.value!r} is written twice (first in line {lines[name]})"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[name] = key.start_mark.line + 1


def _join_surrogates(text: str) -> str:
    """Join the escaped halves of a character beyond 16 bits, which JSON writes as two escapes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


_CoreLoader.yaml_implicit_resolvers = {}  # of its own, without those of YAML 1.1
for _tag, _pattern, _first in _CORE_SCHEMA:
    _CoreLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}",
        re.compile(rf"^(?:{_pattern})$"),
        ["" if character == "\0" else character for character in _first],
    )
_CoreLoader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in ("null", "bool", "float", "seq")
}
_CoreLoader.add_constructor("tag:yaml.org,2002:int", _CoreLoader.construct_core_int)
_CoreLoader.add_constructor("tag:yaml.org,2002:str", _CoreLoader.construct_text)
_CoreLoader.add_constructor("tag:yaml.org,2002:map", _CoreLoader.construct_unique_mapping)


def parse_yaml(text: str, source: str) -> Any:
    """Return the plain data of a YAML text; raises ConfigError naming `source`, line and column."""
    try:
        return yaml.load(text, Loader=_CoreLoader)  # noqa: S506 - a subclass of SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {_explain(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: not valid YAML: nested too deeply") from error


def read_yaml(path: Path, source: str, kind: str) -> dict[str, Any]:
    """Return the mapping in a YAML file; `kind` says in errors what the file should be.

    Raises ConfigError when the file is missing, unreadable, not UTF-8, not YAML or not a mapping.
    """
    data = parse_yaml(_read_text(path, source, kind), source)
    if data is None:
        raise ConfigError(f"{source}: the file is empty; expected {kind}")
    if not isinstance(data, dict):
        found = f"a {type(data).__name__}"
        raise ConfigError(f"{source}: found {found} at the top; expected {kind}, a mapping of keys")
    return data


def _read_text(path: Path, source: str, kind: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{source}: no such file; expected {kind}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{source}: is a folder; expected {kind}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source}: byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source}: cannot be read ({error}); expected {kind}") from error


def _explain(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return "not valid YAML: " + " ".join(str(error).split())
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    text = ", ".join(part for part in (error.context, error.problem) if part)
    return f"{where}{text}"
