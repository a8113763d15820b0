"""A model's chat template, rendered as transformers' `apply_chat_template` does, without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from eagle_batch.data.conversations import encodable
from eagle_batch.data.weights import fetch_hub, fetch_url
from eagle_batch.errors import ConfigError, Reason, RequestError
from eagle_batch.pipeline.locations import DEMO_PREFIX, is_demo, is_url
from eagle_batch.pipeline.problems import suggestion

#: Special tokens that a template sees as variables.
_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
#: Stands for what a user says, to find where a template puts it.
_MARK = "WhatTheUserSays"
#: What a template is always told, and what nobody sets.
_FIXED = {"messages", "add_generation_prompt", "continue_final_message"}
_TOKENIZER_FILES = ("*.jinja", "*.json", "*.model", "*.txt", "additional_chat_templates/*")


class ChatTemplate:
    """One chat template with its special tokens."""

    def __init__(
        self,
        text: str,
        tokens: Mapping[str, str],
        source: str,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile the template; `now` is its clock. Raises ConfigError if it is not valid."""
        self.text = text
        self.tokens = dict(tokens)
        self.source = source
        try:
            environment = _environment(now)
            self._template = environment.from_string(text)
            names = find_undeclared_variables(environment.parse(text))
            self._variables = names - set(environment.globals)
        except TemplateError as error:
            raise ConfigError(f"{source}: the chat template is not valid: {error}") from error

    @classmethod
    def load(cls, folder: Path, now: Callable[[], datetime] = datetime.now) -> ChatTemplate:
        """Read a model's folder; raises ConfigError where it has no chat template."""
        config = _read_json(folder / "tokenizer_config.json")
        text = _template_text(folder, config)
        if text is None:
            raise ConfigError(
                f"target.model: {folder} has no chat template (chat_template.jinja, or "
                "chat_template in tokenizer_config.json); give the stages a prompt instead of "
                "messages, or choose a chat model"
            )
        return cls(text, _special_tokens(folder, config), str(folder), now)

    @property
    def uses_clock(self) -> bool:
        """Whether the prompt depends on today's date."""
        return "strftime_now" in self.text

    def option_problems(self, options: Mapping[str, object]) -> list[str]:
        """Return one line for each option that the template would not look at."""
        known = sorted(self._variables - {*_FIXED, *self.tokens})
        return [
            f"{name}: the chat template of {self.source} does not use it; "
            f"{suggestion(name, known)}expected one of {', '.join(known) or 'none'}"
            for name in options
            if name not in known
        ]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, object] | None = None,
        start: str | None = None,
    ) -> str:
        """Return the prompt, up to where the assistant begins, or goes on after `start`.

        `options` are variables of the template, beside the messages. Tokenise the prompt without
        adding special tokens: the template has written them. Raises RequestError (template_error)
        where the template refuses the messages.
        """
        if start is None:
            return self._render(messages, options, add_generation_prompt=True)
        # As with transformers' continue_final_message: the answer is the last message, cut open.
        answer = {"role": "assistant", "content": _MARK + start.strip()}
        text = self._render([*messages, answer], options, add_generation_prompt=False)
        before, mark, after = text.rpartition(_MARK)
        if not mark or not after.startswith(start.strip()):
            raise RequestError(
                Reason.TEMPLATE_ERROR, "the chat template changes the answer's start"
            )
        return before + start

    def open_turn(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, str]:
        """Return the prompt up to where a user's next turn begins, and what would end that turn.

        The end is empty where the template writes nothing behind a last message. Raises
        RequestError (template_error) where the template refuses the messages, or changes them.
        """
        turn = {"role": "user", "content": _MARK}
        text = self._render([*messages, turn], None, add_generation_prompt=False)
        before, mark, after = text.rpartition(_MARK)
        if not mark:
            raise RequestError(Reason.TEMPLATE_ERROR, "the chat template hides the user's text")
        return before, after.strip()

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, object] | None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        fixed = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            **self.tokens,
        }
        try:
            text = self._template.render(
                {"tools": None, "documents": None, **(options or {}), **fixed}
            )
        except Exception as error:
            # The template is the model's code: what it raises about a row is the row's.
            message = f"the chat template refused the messages: {error}"
            raise RequestError(Reason.TEMPLATE_ERROR, message) from error
        return encodable(text, "the chat prompt")


def model_folder(model: str, revision: str | None = None) -> Path:
    """Return the folder with a model's tokenizer: its own, a demo's, or one of the hub's cache.

    Raises ConfigError where there is none; a hub id is downloaded, tokenizer files only.
    """
    if is_demo(model):
        from eagle_batch import demo

        return demo.resolve(model.removeprefix(DEMO_PREFIX))
    if is_url(model):
        return fetch_url(model, _TOKENIZER_FILES)
    folder = Path(model)
    if folder.is_absolute():
        if not (folder / "config.json").is_file():
            what = "has no config.json" if folder.is_dir() else "is no folder"
            raise ConfigError(f"target.model: {folder} {what}; expected the folder of a model")
        return folder
    return _from_hub(model, revision)


def _from_hub(model: str, revision: str | None) -> Path:
    try:
        return fetch_hub(model, revision, _TOKENIZER_FILES)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"target.model: {model!r} is no folder beside the pipeline file, and cannot be had "
            f"from the hub ({reason}); check the name, or download it and name the folder"
        ) from error


def _template_text(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the default template; a file of its own goes before the tokenizer's configuration."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {item["name"]: item["template"] for item in found}
    if isinstance(found, dict):
        found = found.get("default")
    return found if isinstance(found, str) else None


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    if "added_tokens_decoder" not in config:
        config = {**config, **_read_json(folder / "special_tokens_map.json")}
    tokens = {name: config.get(name) for name in _TOKENS}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in tokens.items()
        if token is not None
    }


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"target.model: {file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"target.model: {file} holds no JSON object")
    return data


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks what a model wrote; it prints as is."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateDict:
    """`dict` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _SafeNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, as in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a key of the namespace
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace holds no name that begins with an underscore ({name!r})")


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = partial(_format_now, now)
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _SafeNamespace
    return environment


def _raise(message: str) -> None:
    raise TemplateError(message)


def _format_now(now: Callable[[], datetime], form: str) -> str:
    return now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the signature that templates rely on
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
