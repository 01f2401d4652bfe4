"""Conversion of conversations to one form: {"messages": [{"role", "content", ...}], "tools": [...]}."""

import json
from collections.abc import Collection
from typing import Any

from jaxopt_llm.core.errors import InputError

# Required columns of each form.
FORMS = {"messages": {"messages"}, "pairs": {"prompt", "completion"}, "sharegpt": {"conversations"}}
OPTIONAL_COLUMNS = {"tools", "system", "chosen", "rejected"}  # read if they exist
_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}  # other names of roles
_ROLES = ("user", "assistant", "system", "tool")


class Malformed(Exception):
    """Exception for a row that does not hold a valid text or conversation; its message is the reason."""


def matching_forms(columns: Collection[str]) -> list[str]:
    """Return the forms whose required columns are all present."""
    return [form for form, required in FORMS.items() if required <= {*columns}]


def detect_form(columns: Collection[str], where: str) -> str:
    """Return the form that has these columns. Raises InputError if no form or several forms match."""
    forms = matching_forms(columns)
    if len(forms) == 1:
        return forms[0]
    known = "; ".join(f"{form}: {', '.join(sorted(required))}" for form, required in FORMS.items())
    matches = f"several forms of conversations ({', '.join(forms)})" if forms else "no form of conversations"
    raise InputError(
        f"{where}: the fields {', '.join(sorted(columns))} match {matches}; set data.content to the form (forms and "
        f"their fields: {known})"
    )


def normalize_conversation(row: Any, form: str) -> str:
    """Return a row of a form as JSON text in the common form.

    Null values count as absent, because Parquet gives every message every field. Raises Malformed if the row is not a
    valid conversation.
    """
    row = _without_nulls(row)
    if not isinstance(row, dict) or not row.keys() >= FORMS[form]:
        raise Malformed(f"truncated, or without the fields of the form {form} ({', '.join(sorted(FORMS[form]))})")
    if row.keys() & {"chosen", "rejected"}:
        raise Malformed("it holds a preference pair (chosen, rejected) instead of one conversation")
    if form == "pairs":
        if not isinstance(row["prompt"], str) or not isinstance(row["completion"], str):
            raise Malformed("prompt or completion is not text; put lists of messages into one field, messages")
        messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    else:
        messages = row["messages" if form == "messages" else "conversations"]
    if not isinstance(messages, list):
        raise Malformed("messages is not a list")
    if form == "sharegpt":
        messages = [_from_sharegpt(message) for message in messages]
    messages = [_message(message) for message in messages]
    if isinstance(row.get("system"), str):
        if messages and messages[0]["role"] == "system":
            raise Malformed("it has both a system field and a system message")
        messages.insert(0, {"role": "system", "content": row["system"]})
    if not any(message["role"] == "assistant" for message in messages):
        raise Malformed("it has no assistant message")
    tools = row.get("tools", [])
    if isinstance(tools, str):  # datasets whose columns must have a single type store tools as JSON text
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise Malformed("tools is not valid JSON") from None
    if not isinstance(tools, list):
        raise Malformed("tools is not a list")
    return json.dumps({"messages": messages, **({"tools": tools} if tools else {})}, ensure_ascii=False)


def _from_sharegpt(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    sender = message.get("from")
    if sender not in (*_SHAREGPT, *_ROLES):
        raise Malformed(f"a message is from {sender!r}; it must be from one of {', '.join((*_SHAREGPT, *_ROLES))}")
    return {"role": _SHAREGPT.get(sender, sender), "content": message.get("value")}


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Malformed("a message has no role")
    if isinstance(message.get("content"), list):
        # Most templates only support text, and would write the list in Python's syntax.
        message = {**message, "content": "".join(map(_text, message["content"]))}
    if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
        raise Malformed(f"the content of a message of role {message['role']} is not text")
    return message


def _text(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise Malformed("a part of a message is not text")
    return str(part["text"])


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
