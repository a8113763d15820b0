"""Conversations that a row brings along: a list of messages, in the forms that data sets have."""

from __future__ import annotations

from typing import Any

from eagle_batch.data.sandbox import is_null
from eagle_batch.errors import Reason, RequestError

#: Names of the two keys in data sets of the ShareGPT kind, and of those who speak there.
_KEYS = {"from": "role", "value": "content"}
_ROLES = {"human": "user", "gpt": "assistant"}


def conversation(value: object, key: str) -> list[dict[str, Any]]:
    """Return the turns of a conversation as {"role", "content"} and what else they hold.

    Items may have `from` and `value` instead, and parts of text instead of a text. Raises
    RequestError (template_error, or invalid_text for text that has no UTF-8 form), saying which
    turn is wrong.
    """
    if not isinstance(value, list | tuple):
        found = "null" if is_null(value) else f"{type(value).__name__} {str(value)[:40]!r}"
        raise _wrong(f"{key}: found {found}; expected a list of messages with role and content")
    if not value:
        raise _wrong(f"{key}: the list of messages is empty")
    return [_turn(item, f"{key}: turn {number}") for number, item in enumerate(value)]


def encodable(text: str, where: str) -> str:
    """Return the text; raises RequestError (invalid_text) if it has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{where}: character {error.start} is half of a character (a lone surrogate)"
        raise RequestError(Reason.INVALID_TEXT, message) from error
    return text


def _turn(item: object, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise _wrong(f"{where} is {type(item).__name__}; expected role and content")
    given = {str(name): value for name, value in item.items() if not is_null(value)}
    turn: dict[str, Any] = {_KEYS.get(name, name): value for name, value in given.items()}
    for name in ("role", "content"):
        if name not in turn:
            raise _wrong(f"{where} has no {name}; expected role and content, not null, in each")
    role = turn["role"]
    if not isinstance(role, str):
        raise _wrong(f"{where}: its role is {type(role).__name__}; expected text")
    turn["role"] = _ROLES.get(role, role) if "value" in item else role
    turn["content"] = encodable(_text(turn["content"], where), where)
    return turn


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "".join(_part(part, where) for part in content)
    raise _wrong(f"{where}: its content is {type(content).__name__}; expected text")


def _part(part: object, where: str) -> str:
    """Return the text of one part of a content, as the OpenAI format has them."""
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise _wrong(f"{where}: holds a part of type {kind}; expected parts of text alone")


def _wrong(message: str) -> RequestError:
    return RequestError(Reason.TEMPLATE_ERROR, message)
