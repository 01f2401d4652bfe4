"""Conversion of conversations to one form: {"messages": [{"role", "content", ...}], "tools", "arguments", "unlearned"}.

`tools` is a list. `arguments` holds further variables of the chat template (chat_template_kwargs of the row).
`unlearned` lists the indices of the assistant's messages of which nothing is learned. Each of the three is absent if it
is empty.
"""

import json
from collections.abc import Collection
from typing import Any

from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.skipped import Malformed

# Required columns of each form.
FORMS = {
    "messages": {"messages"},
    "pairs": {"prompt", "completion"},
    "sharegpt": {"conversations"},
    "alpaca": {"instruction", "output"},
}
_OPTIONAL_COLUMNS = {"tools", "system", "chosen", "rejected"}  # read if they exist
_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}  # other names of roles
_PREFERENCE_PAIR = "with a preference pair (chosen, rejected) instead of one conversation"
_ROLES = ("user", "assistant", "system", "tool")


def columns(form: str) -> set[str]:
    """Return the columns that are read if they exist."""
    return FORMS[form] | _OPTIONAL_COLUMNS | ({"input"} if form == "alpaca" else set())


def matching_forms(columns: Collection[str]) -> list[str]:
    """Return the forms whose required columns are all present."""
    forms = [form for form, required in FORMS.items() if required <= {*columns}]
    # Conversations that were made from instructions often keep the instructions in other columns.
    return [form for form in forms if form != "alpaca"] or forms


def detect_form(columns: Collection[str], where: object) -> str:
    """Return the form that has these columns. Raises InputError if no form or several forms match."""
    forms = matching_forms(columns)
    if len(forms) == 1:
        return forms[0]
    if {"chosen", "rejected"} <= {*columns}:
        remedy = "write the prompt and the chosen answer as prompt and completion"
        raise InputError(f"{where}: {_PREFERENCE_PAIR}; {remedy}")
    fields = f"{where}: the fields {', '.join(sorted(columns))} match"
    if forms:
        raise InputError(
            f"{fields} several forms of conversations; set --data.content to one of them: {', '.join(forms)}"
        )
    known = "; ".join(f"{form}: {', '.join(sorted(required))}" for form, required in FORMS.items())
    remedy = "or read them as text with --data.content text"
    raise InputError(f"{fields} no form of conversations; rename them to the fields of a form ({known}), {remedy}")


def normalize_conversation(row: dict[str, Any], form: str) -> str:
    """Return a row of a form as JSON text in the common form.

    Null values count as absent, because Parquet gives every message every field. Raises Malformed if the row is not a
    valid conversation.
    """
    row = _without_nulls(row)
    if not row.keys() >= FORMS[form]:
        raise Malformed(f"without the fields of the form {form} ({', '.join(sorted(FORMS[form]))})")
    if row.keys() & {"chosen", "rejected"}:
        raise Malformed(_PREFERENCE_PAIR)
    context, learned = _split_messages(row, form)
    if isinstance(row.get("system"), str):
        if any(message["role"] == "system" for message in (context + learned)[:1]):
            raise Malformed("with both a system field and a system message")
        context.insert(0, {"role": "system", "content": row["system"]})
    if not _speaks(learned):
        place = "in the completion" if form == "pairs" else ""
        raise Malformed("without an assistant message", place)
    tools = _parse_list(row.get("tools", []), "tools")
    conversation: dict[str, Any] = {"messages": context + learned}
    if tools:
        conversation["tools"] = tools
    if unlearned := [index for index, message in enumerate(context) if message["role"] == "assistant"]:
        conversation["unlearned"] = unlearned
    return json.dumps(conversation, ensure_ascii=False)


def _split_messages(row: dict[str, Any], form: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the messages of which nothing is learned, and the messages whose assistant turns are learned."""
    if form == "pairs":
        prompt, completion = _read_turns(row["prompt"], "user"), _read_turns(row["completion"], "assistant")
        return [_message(message) for message in prompt], [_message(message) for message in completion]
    if form == "alpaca":
        texts = [row["instruction"], row.get("input", ""), row["output"]]
        if not all(isinstance(text, str) for text in texts):
            raise Malformed("with an instruction, input or output that is not text")
        instruction, given, output = texts
        asked = f"{instruction}\n\n{given}" if given else instruction
        return [], [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    (name,) = FORMS[form]
    messages = _without_nulls(_parse_list(row[name], name))
    return [], [_message(_from_sharegpt(message) if form == "sharegpt" else message) for message in messages]


def _read_turns(value: Any, role: str) -> list[Any]:
    """Return a prompt or a completion as messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise Malformed("with a prompt or completion that is neither text nor a list of messages")
    return value


def _parse_list(value: Any, name: str) -> list[Any]:
    """Return a list. A table whose columns have a single type, such as CSV, stores it as JSON text."""
    if isinstance(value, str):
        try:
            value = json_files.parse(value)
        except ValueError as error:
            raise Malformed(f"with {name} that are not a list or its JSON text", str(error)) from None
    if not isinstance(value, list):
        raise Malformed(f"with {name} that are not a list or its JSON text")
    return value


def _speaks(messages: list[dict[str, Any]]) -> bool:
    return any(message["role"] == "assistant" for message in messages)


def _from_sharegpt(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    sender = message.get("from")
    if sender not in (*_SHAREGPT, *_ROLES):
        detail = f"it is from {sender!r}; it must be from one of {', '.join((*_SHAREGPT, *_ROLES))}"
        raise Malformed("with a message from an unknown sender", detail)
    return {"role": _SHAREGPT.get(sender, sender), "content": message.get("value")}


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        is_sharegpt = isinstance(message, dict) and {"from", "value"} <= message.keys()
        detail = "with from and value instead: rename the field messages to conversations, as in the form sharegpt"
        raise Malformed("with a message without a role", detail if is_sharegpt else "")
    if isinstance(message.get("content"), list):
        # Most templates only support text, and would write the list in Python's syntax.
        message = {**message, "content": "".join(map(_text, message["content"]))}
    if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
        raise Malformed("with a message whose content is not text", f"its role is {message['role']}")
    return message


def _text(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise Malformed("with a part of a message that is not text")
    return str(part["text"])


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
