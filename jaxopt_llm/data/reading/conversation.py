"""Conversion of conversations to one form: {"messages": [{"role", "content", ...}], "tools", "arguments", "unlearned"}.

`tools` is a list. `arguments` holds further variables of the chat template (chat_template_kwargs of the row).
`unlearned` lists the indices of assistant messages that are not learned. Each of the three is absent if it is empty.

A field of a row or of a message is used, makes its row malformed, or is counted as not read. Other trainers give some
fields a meaning that this one does not have. A row that has such a field is malformed, because training on the rest of
the row would be another training. Any other field that nothing reads is counted by its name.
"""

import functools
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxopt_llm.config.data import FORMS, fields_of_form
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.skipped import Malformed, Skipped

# --- Fields of rows and messages


PREFERENCE_PAIR = "with a preference pair (chosen, rejected) instead of one conversation"
_JUDGED = "which judges answers or compares them"
_NO_TEXT = "which is not text"
_TOKENS = "which belongs to rows of tokens"
_MEDIA = dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _NO_TEXT)
# Fields that have a meaning elsewhere and cannot be used here, with the reason.
UNUSABLE_IN_ROWS = {
    **_MEDIA,
    **dict.fromkeys(("rejected_response", "rejected_messages", "score_chosen", "score_rejected"), _JUDGED),
    **dict.fromkeys(("margin", "kto_tag", "label"), _JUDGED),
    **dict.fromkeys(("input_ids", "assistant_masks", "completion_mask"), _TOKENS),
    **dict.fromkeys(("functions", "function_call", "available_tools"), "write tools instead"),
    "system_prompt": "which is read with --data.columns system=system_prompt",
    "only_last": "which is replaced by weight 0 on the assistant's other messages",
    "weight": "which gives the whole row a weight",
}
UNUSABLE_IN_MESSAGES = {
    **_MEDIA,
    "function_call": "write tool_calls instead",
    "refusal": "which is not part of the content",
    **dict.fromkeys(("train_detail", "training_detail"), "which trains on parts of a message"),
}
# Fields of a message that are 1 (or true) if it is learned and 0 (or false) if not: those of OpenAI, of LLaMA-Factory,
# of Axolotl and of ms-swift.
LEARNED_FLAGS = ("weight", "loss_weight", "train", "training", "loss")


@functools.cache  # it is asked for each column of each row
def known_fields(form: str) -> frozenset[str]:
    """Return the fields of a row that are used, or make it malformed."""
    return frozenset({*fields_of_form(form), "chosen", "rejected", *UNUSABLE_IN_ROWS})


def check_row(row: Mapping[str, Any]) -> None:
    """Raise Malformed if a row has a field that cannot be used. Empty values count as absent."""
    if row.keys() & {"chosen", "rejected"}:
        raise Malformed(PREFERENCE_PAIR, "--data.columns chosen= rejected= leaves it unread")
    for name, reason in UNUSABLE_IN_ROWS.items():
        if name in row and row[name] not in ("", [], {}) and not _is_harmless(name, row[name]):
            raise Malformed(f"with the field {name}, {reason}", f"--data.columns {name}= leaves it unread")


def _is_harmless(name: str, value: Any) -> bool:
    """Return whether a value of a field that cannot be used makes no difference."""
    if name == "label":  # true and false judge an answer, while a number or a text names a class
        return not isinstance(value, bool)
    return (name == "only_last" and value is False) or (name == "weight" and value == 1)


def take_learned(message: dict[str, Any], is_assistant: bool) -> bool:
    """Remove the fields of a message that tell whether it is learned, and return whether it is.

    Raises:
        Malformed: a field cannot be used, or tells to learn a message that is not the assistant's.
    """
    for name, reason in UNUSABLE_IN_MESSAGES.items():
        if message.get(name) not in (None, "", [], {}):
            raise Malformed(f"with a message that has the field {name}, {reason}")
    flags = {name: message.pop(name) for name in LEARNED_FLAGS if name in message}
    for name, flag in flags.items():
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise Malformed(f"with a message whose {name} is neither 0 nor 1", f"it is {flag!r}")
        if flag and not is_assistant:
            raise Malformed(f"with {name} on a message that is not the assistant's, and is never learned")
    return all(flags.values())


class FieldCounter:
    """Counter of the fields that nothing reads.

    Args:
        skipped: holds the counts.
        template: source of the chat template. It reads a field of a message, or an argument, if it has its name.
    """

    def __init__(self, skipped: Skipped, template: str) -> None:
        self.skipped = skipped
        self._template = template
        self._is_read: dict[str, bool] = {}

    def names(self, text: str) -> bool:
        """Return whether the template compares something with a text: it has the text as a constant."""
        return f"'{text}'" in self._template or f'"{text}"' in self._template

    def count(self, names: Collection[str], owner: str = "") -> None:
        """Count fields of one row that only the template can read. owner: what has the fields, for messages."""
        for name in sorted(names):
            if name not in self._is_read:
                self._is_read[name] = re.search(rf"\b{re.escape(name)}\b", self._template) is not None
            if not self._is_read[name]:
                self.skipped.add_unread(f"{name} of {owner}" if owner else name)


# --- Conversations


# Roles by the value of `from`. A value of `role` is passed to the template, which may know other names; see `_sender`.
_SPEAKERS = {"human": "user", "gpt": "assistant"}
_SENDERS = {
    **_SPEAKERS,
    **{"observation": "tool", "function_call": "assistant"},
    **{role: role for role in ("user", "assistant", "system", "developer", "tool")},
}
# Fields of a message that are learned. The renderer makes sure that the template does not leave them out.
_RENDERED = {"role", "content", "tool_calls", "reasoning_content", "reasoning", "thinking"}
# Start of a list or an object in Python's syntax, which quotes texts with apostrophes.
_PYTHON_TEXT = re.compile(r"[\s\[{]+'")
_PYTHON_SYNTAX = "a CSV made by pandas has Python's syntax; save it as Parquet or JSONL"

Messages = list[dict[str, Any]]


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
        raise InputError(f"{where}: {PREFERENCE_PAIR}; {remedy}")
    fields = f"{where}: the fields {', '.join(sorted(columns))} match"
    if forms:
        raise InputError(
            f"{fields} several forms of conversations; set --data.content to one of them: {', '.join(forms)}"
        )
    known = "; ".join(f"{form}: {', '.join(sorted(required))}" for form, required in FORMS.items())
    remedy = f"name the columns of a form with --data.columns FIELD=COLUMN ({known}), or read them as text with"
    raise InputError(f"{fields} no form of conversations; {remedy} --data.content text")


def normalize_conversation(row: dict[str, Any], form: str, counter: FieldCounter) -> str:
    """Return a row of a form as JSON text in the common form.

    Null fields of a row, of a message and of a part of a content count as absent. So do empty texts in fields that the
    form does not require, because CSV has no null. Nulls within other values, such as arguments of a call, stay. The
    reader of a table has removed those that fill absent fields.

    Args:
        row: the values by field.
        form: its form.
        counter: counts the fields that the template does not read.

    Raises:
        Malformed: the row is not a valid conversation, or has a field that cannot be used.
    """
    row = {name: value for name, value in _without_nulls(row).items() if value != "" or name in FORMS[form]}
    if not row.keys() >= FORMS[form]:
        detail = f"it has {', '.join(sorted(row)[:20])}; --data.columns FIELD=COLUMN names other columns"
        raise Malformed(f"without the fields of the form {form} ({', '.join(sorted(FORMS[form]))})", detail)
    check_row(row)
    if "label" in row:
        counter.count({"label"})
    context, answers = _split_messages(row, form, counter)
    learns = [take_learned(message, message["role"] == "assistant") for message in context + answers]
    learns[: len(context)] = [False] * len(context)
    messages = context + answers
    if "system" in row:
        if not isinstance(row["system"], str):
            raise Malformed("with a system field that is not text")
        if messages and messages[0]["role"] == "system":
            raise Malformed("with both a system field and a system message")
        messages, learns = [{"role": "system", "content": row["system"]}, *messages], [False, *learns]
    speaks = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not any(message["role"] == "assistant" for message in answers):
        roles = ", ".join(sorted({message["role"] for message in answers})) or "no message"
        raise Malformed("without an assistant message", f"{'the completion' if form == 'pairs' else 'it'} has {roles}")
    if not any(learns[index] for index in speaks):
        raise Malformed("without an assistant message that is learned")
    counter.count({name for message in messages for name in message} - _RENDERED, "a message")
    conversation = {
        "messages": messages,
        "tools": _read_tools(row, form),
        "arguments": _read_arguments(row, counter),
        "unlearned": [index for index in speaks if not learns[index]],
    }
    present = {name: value for name, value in conversation.items() if value}
    return json.dumps(present, ensure_ascii=False, default=_describe_value)


def _split_messages(row: dict[str, Any], form: str, counter: FieldCounter) -> tuple[Messages, Messages]:
    """Return the messages that are only context, and the messages whose assistant turns are learned."""
    if form == "pairs":
        prompt, completion = _read_turns(row["prompt"], "user"), _read_turns(row["completion"], "assistant")
        return [_message(each, counter) for each in prompt], [_message(each, counter) for each in completion]
    if form == "alpaca":
        return [], _read_instructions(row)
    (name,) = FORMS[form]
    return [], [_message(message, counter) for message in _parse(row[name], list, name)]


def _read_instructions(row: dict[str, Any]) -> Messages:
    """Return the earlier turns of a row and its last two. All answers are learned, as in LLaMA-Factory."""
    instruction, given, output = texts = [row["instruction"], row.get("input", ""), row["output"]]
    if not all(isinstance(text, str) for text in texts):
        raise Malformed("with an instruction, input or output that is not text")
    turns = _parse(row.get("history", []), list, "history")
    for turn in turns:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise Malformed("with a history that is not a list of pairs of texts")
    turns = [*turns, ["\n\n".join(filter(None, (instruction, given))), output]]
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _read_turns(value: Any, role: str) -> list[Any]:
    """Return a prompt or a completion as messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise Malformed("with a prompt or completion that is neither text nor a list of messages")
    return value


def _read_tools(row: dict[str, Any], form: str) -> list[Any]:
    tools = []
    for tool in _parse(row.get("tools", []), list, "tools"):
        if form == "sharegpt" and isinstance(tool, dict) and "name" in tool and "function" not in tool:
            # The function alone, as LLaMA-Factory's files have it. Templates expect it within an object.
            tool = {"type": "function", "function": tool}
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("parameters"), str):
            # As Axolotl's files have it, because a column has one type. A template would write text within text.
            tool = {**tool, "function": {**function, "parameters": _parse(function["parameters"], dict, "parameters")}}
        tools.append(tool)
    return tools


def _read_arguments(row: dict[str, Any], counter: FieldCounter) -> dict[str, Any]:
    """Return the further variables of the template, and count those that it does not read."""
    arguments = dict(_parse(row.get("chat_template_kwargs", {}), dict, "chat_template_kwargs"))
    counter.count(arguments.keys(), "chat_template_kwargs")
    if "parallel_tool_calls" in row:
        counter.count({"parallel_tool_calls"})
        arguments.setdefault("parallel_tool_calls", row["parallel_tool_calls"])
    return arguments


def _parse(value: Any, kind: type, name: str) -> Any:
    """Return a list or an object. A table whose columns have a single type, such as CSV, stores it as JSON text."""
    shown = "a list" if kind is list else "an object"
    problem = f"with {name} other than {shown} or its JSON text"
    if isinstance(value, str):
        try:
            value = json_files.parse(value)
        except ValueError as error:
            raise Malformed(problem, _PYTHON_SYNTAX if _PYTHON_TEXT.match(value) else str(error)) from None
    if not isinstance(value, kind):
        raise Malformed(problem)
    return value


def _sender(message: dict[str, Any], counter: FieldCounter) -> str:
    """Return the sender of a message that is named as in `from`, or an empty text if its role is for the template.

    A template that compares roles with `tool` does not expect `observation`, while others write the name of any role.
    No template expects the JSON text of a function_call.
    """
    if "role" not in message:
        return str(message["from"])
    role = str(message["role"])
    is_sender = role == "function_call" or (role == "observation" and counter.names("tool"))
    return role if is_sender and not counter.names(role) else ""


def _message(message: Any, counter: FieldCounter) -> dict[str, Any]:
    """Return a message with a role and a content, whatever their names are."""
    message = _without_nulls(message) if isinstance(message, dict) else {}
    if not isinstance(message.get("role", message.get("from")), str):
        raise Malformed("with a message without a role")
    if sender := _sender(message, counter):
        message.pop("role" if "role" in message else "from")
        if sender not in _SENDERS:
            detail = f"it is from {sender!r}; it must be from one of {', '.join(_SENDERS)}"
            raise Malformed("with a message from an unknown sender", detail)
        message = {"role": _SENDERS[sender], **message}
        if sender == "function_call":
            value = message.pop("value", None)
            message["tool_calls"] = _parse_calls(message.pop("content", value))
    if "content" not in message and "value" in message:
        # In this order, because a template may write the message as JSON.
        message = {"role": message.pop("role"), "content": message.pop("value"), **message}
    message["role"] = _SPEAKERS.get(message["role"], message["role"])
    if isinstance(message.get("content"), list):
        # Most templates only support text, and would write the list in Python's syntax.
        message["content"] = "".join(map(_text, message["content"]))
    if message.get("tool_calls", "") == "":
        message.pop("tool_calls", None)
    else:
        message["tool_calls"] = _parse(message["tool_calls"], list, "tool_calls")
        if not all(isinstance(call, dict) for call in message["tool_calls"]):
            raise Malformed("with tool_calls that are not objects")
        message["tool_calls"] = [_check_arguments(call) for call in message["tool_calls"]]
    if not isinstance(message.get("content", "" if message.get("tool_calls") else None), str):
        raise Malformed("with a message whose content is not text", f"its role is {message['role']}")
    return message


def _parse_calls(value: Any) -> list[Any]:
    """Return the tool calls of a message from function_call: a call or a list of calls, usually as JSON text."""
    try:
        calls = json_files.parse(value) if isinstance(value, str) else value
    except ValueError as error:
        raise Malformed("with a function_call that is not JSON", str(error)) from None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        raise Malformed("with a function_call without name and arguments")
    return [{"type": "function", "function": call} for call in calls]


def _check_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments, if they are a text, are JSON. An empty text means no arguments."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _check_arguments(call["function"])}
    if not isinstance(arguments := call.get("arguments"), str):
        return call
    if not arguments.strip():
        return {**call, "arguments": "{}"}
    try:
        json_files.parse(arguments)
    except ValueError as error:
        raise Malformed("with arguments of a tool call that are not JSON", str(error)) from None
    return call


def _text(part: Any) -> str:
    """Return the text of a part of a content, which LLaMA-Factory and Axolotl also name `value`."""
    part = _without_nulls(part) if isinstance(part, dict) else part
    text = part.get("text", part.get("value")) if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = f"its type is {part['type']}" if isinstance(part, dict) and "type" in part else ""
        raise Malformed("with a part of a message that is not text", kind)
    if part.keys() & {"train", "weight"}:
        raise Malformed("with a part of a message that has train or weight of its own")
    return text


def _describe_value(value: Any) -> str:
    """Return a value that only tables hold, such as a date, as the template would write it."""
    if isinstance(value, bytes):
        raise Malformed("with bytes in a conversation")
    return str(value)


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null."""
    return {name: value for name, value in fields.items() if value is not None}
