"""Conversations as files hold them, made one form: {"messages": [{"role", "content", ...}], "tools": [...]}."""

import json
from collections.abc import Collection
from typing import Any

from jaxopt_llm.errors import InputError

# The columns that each form needs.
FORMS = {"messages": {"messages"}, "pairs": {"prompt", "completion"}, "sharegpt": {"conversations"}}
BESIDE = {"tools", "system", "chosen", "rejected"}  # columns that are read where there are
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


class Malformed(Exception):
    """No conversation, and why."""


def forms(columns: Collection[str]) -> list[str]:
    """The forms that have these columns."""
    return [form for form, needed in FORMS.items() if needed <= {*columns}]


def form_of(columns: Collection[str], where: str) -> str:
    """Raises InputError where the columns are those of no form, or of several."""
    found = forms(columns)
    if len(found) == 1:
        return found[0]
    known = "; ".join(f"{form}: {', '.join(sorted(needed))}" for form, needed in FORMS.items())
    what = f"conversations as {' and as '.join(found)}" if found else "no conversations"
    raise InputError(
        f"{where}: the fields {', '.join(sorted(columns))} are {what}; data.content chat knows them by their fields "
        f"({known}), or name the form itself"
    )


def conversation(row: Any, form: str) -> str:
    """A row as JSON text. What is null is as if it were not there: Parquet gives every message every field.

    Raises Malformed.
    """
    row = _without_nulls(row)
    if not isinstance(row, dict) or not row.keys() >= FORMS[form]:
        raise Malformed(f"cut, or without the fields of {form} ({', '.join(sorted(FORMS[form]))})")
    if row.keys() & {"chosen", "rejected"}:
        raise Malformed("it has a preference (chosen, rejected), where one conversation is expected")
    if form == "messages":
        messages = row["messages"]
    elif form == "pairs":
        if not isinstance(row["prompt"], str) or not isinstance(row["completion"], str):
            raise Malformed("a prompt or a completion that is no text; lists of messages go into one field, messages")
        messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    else:
        messages = row["conversations"]
        if isinstance(messages, list):
            messages = [_from_sharegpt(message) for message in messages]
    if not isinstance(messages, list):
        raise Malformed("no list of messages")
    messages = [_message(message) for message in messages]
    if isinstance(row.get("system"), str):
        if messages and messages[0]["role"] == "system":
            raise Malformed("a system field beside a system's turn")
        messages.insert(0, {"role": "system", "content": row["system"]})
    if not any(message["role"] == "assistant" for message in messages):
        raise Malformed("no turn of the assistant")
    tools = row.get("tools", [])
    if isinstance(tools, str):  # as data sets keep them whose columns must have one type
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise Malformed("tools that are no JSON") from None
    if not isinstance(tools, list):
        raise Malformed("tools that are no list")
    return json.dumps({"messages": messages, **({"tools": tools} if tools else {})}, ensure_ascii=False)


def _from_sharegpt(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    role = message.get("from")
    if role not in _SHAREGPT:
        raise Malformed(f"a message from {role!r}, not from {', '.join(_SHAREGPT)}")
    return {"role": _SHAREGPT[role], "content": message.get("value")}


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Malformed("a message without a role")
    if isinstance(message.get("content"), list):
        # Most templates write text alone, and would write the list as Python does.
        message = {**message, "content": "".join(map(_text, message["content"]))}
    if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
        raise Malformed(f"a message of the {message['role']} whose content is no text")
    return message


def _text(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise Malformed("a message with a part that is no text")
    return str(part["text"])


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
