"""Conversion of conversations to one form: {"messages": [{"role", "content", ...}], "tools", "arguments", "unlearned"}.

A row with two answers to one prompt becomes two conversations: {"chosen": {"messages", ...}, "rejected": {...}}. The
label of a row with one judged answer is kept beside its conversation (`read_judgement`).
`tools` is a list. `arguments` holds further variables of the chat template (chat_template_kwargs of the row).
`unlearned` lists the indices of assistant messages that are not learned. Each of the three is absent if it is empty.

A field of a row or of a message is used, makes its row malformed, or is counted as not read. Other trainers give some
fields a meaning that this one does not have. A row that has such a field is malformed, because training on the rest of
the row would be another training. Any other field that nothing reads is counted by its name.
"""

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxopt_llm.config.data import FORMS, PREFERENCE, TEXT_FORMS, UNPAIRED, fields_of_form
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.skipped import Malformed, Skipped

# --- Fields of rows and messages


SIDES = ("chosen", "rejected")  # of a pair of answers
JUDGED, MISMATCHED = ("undesirable", "desirable"), "mismatched"  # sides of pairs of data.content=unpaired
_PAIR = "with a preference pair (chosen, rejected) instead of one conversation"
_READ_PAIRS = "--data.content preference and --training.objective dpo train on it"
_READ_JUDGED = "--data.content unpaired and --training.objective kto train on it"
_RENAME = "--data.columns FIELD=COLUMN names other columns"
_COMPARED = "which judges answers or compares them"
_NO_TEXT = "which is not text"
_TOKENS = "which belongs to rows of tokens"
_MEDIA = dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _NO_TEXT)
# Fields that have a meaning elsewhere and cannot be used here, with the reason.
UNUSABLE_IN_ROWS = {
    **_MEDIA,
    **dict.fromkeys(("rejected_response", "rejected_messages", "score_chosen", "score_rejected"), _COMPARED),
    **dict.fromkeys(("margin", "kto_tag", "label"), _COMPARED),
    **dict.fromkeys(("input_ids", "assistant_masks", "completion_mask"), _TOKENS),
    **dict.fromkeys(("functions", "function_call", "available_tools"), "write tools instead"),
    "system_prompt": "which is read with --data.columns system=system_prompt",
    "only_last": "which --data.learn-turns last replaces",
    "weight": "which gives the whole row a weight",
}
_SCORES = frozenset({"score_chosen", "score_rejected"})  # of the two answers of a pair; which one is better is known
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
    prompts = _OTHER_PROMPTS if form == PREFERENCE else ()
    return frozenset({*fields_of_form(form), *SIDES, *UNUSABLE_IN_ROWS, *prompts} - _usable_fields(form))


def _usable_fields(form: str) -> frozenset[str]:
    return _SCORES if form == PREFERENCE else frozenset()


def check_row(row: Mapping[str, Any], form: str) -> None:
    """Raise Malformed if a row has a field that cannot be used. Empty values count as absent."""
    if form != PREFERENCE and row.keys() & {*SIDES}:
        raise Malformed(_PAIR, f"{_READ_PAIRS}; --data.columns chosen= rejected= leaves it unread")
    used = _usable_fields(form) | FORMS[form]
    for name, reason in UNUSABLE_IN_ROWS.items():
        if name in row and name not in used and row[name] not in ("", [], {}) and not _is_harmless(name, row[name]):
            read = f"{_READ_JUDGED}; " if form == "pairs" and name in ("label", "kto_tag") else ""
            raise Malformed(f"with the field {name}, {reason}", f"{read}--data.columns {name}= leaves it unread")


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
        template: source of the chat template. It reads a field of a message, or an argument, if it has its name. None:
            there is no template.
    """

    def __init__(self, skipped: Skipped, template: str | None) -> None:
        self.skipped = skipped
        self.has_template = template is not None
        self._template = template or ""
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
# Start of a list of messages in JSON.
_JSON_MESSAGES = re.compile(r'\s*\[\s*\{\s*"(role|content|from|value)"\s*:')
_PYTHON_SYNTAX = "a CSV made by pandas has Python's syntax; save it as Parquet or JSONL"

Messages = list[dict[str, Any]]


def matching_forms(columns: Collection[str]) -> list[str]:
    """Return the forms whose required columns are all present."""
    forms = [form for form, required in FORMS.items() if required <= {*columns}]
    if PREFERENCE in forms:  # a pair often stands beside a conversation, which is the chosen one
        return [PREFERENCE]
    forms = [form for form in forms if form != UNPAIRED]  # a label may be that of a class
    # Conversations that were made from instructions often keep the instructions in other columns.
    return [form for form in forms if form != "alpaca"] or forms


def detect_form(columns: Collection[str], where: object) -> str:
    """Return the form that has these columns. Raises InputError if no form or several forms match."""
    forms = matching_forms(columns)
    if len(forms) == 1:
        return forms[0]
    fields = f"{where}: the fields {', '.join(sorted(columns))} match"
    if forms:
        raise InputError(
            f"{fields} several forms of conversations; set --data.content to one of them: {', '.join(forms)}"
        )
    known = "; ".join(f"{form}: {', '.join(sorted(required))}" for form, required in FORMS.items())
    remedy = f"name the columns of a form with --data.columns FIELD=COLUMN ({known}), or read them as text with"
    raise InputError(f"{fields} no form of conversations; {remedy} --data.content text")


def normalize_conversation(row: dict[str, Any], form: str, counter: FieldCounter, only_last: bool = False) -> str:
    """Return a row of a form as JSON text in the common form.

    Null fields of a row, of a message and of a part of a content count as absent. So do empty texts in fields that the
    form does not require, because CSV has no null. Nulls within other values, such as arguments of a call, stay. The
    reader of a table has removed those that fill absent fields.

    Args:
        row: the values by field.
        form: its form.
        counter: counts the fields that the template does not read.
        only_last: whether only the last turn is learned, of those that could be.

    Raises:
        Malformed: the row is not a valid conversation, or has a field that cannot be used.
    """
    row = {name: value for name, value in _without_nulls(row).items() if value != "" or name in FORMS[form]}
    if not row.keys() >= FORMS[form]:
        readers = {PREFERENCE: _READ_PAIRS, UNPAIRED: _READ_JUDGED}
        remedy = next((readers[each] for each in readers if row.keys() >= FORMS[each]), _RENAME)
        detail = f"it has {', '.join(sorted(row)[:20])}; {remedy}"
        raise Malformed(f"without the fields of the form {form} ({', '.join(sorted(FORMS[form]))})", detail)
    check_row(row, form)
    if _are_texts(row, form, needed=not counter.has_template):
        counter.skipped.add_texts(are_joined=not counter.has_template)
    if "label" in row and form != UNPAIRED:
        counter.count({"label"})
    if form == PREFERENCE:
        context, *answers = _split_sides(row, counter)
        conversations = [_mark_learned(row, context, *each) for each in zip(answers, _ANSWERS, strict=True)]
    else:
        name = "the completion" if form in ("pairs", UNPAIRED) else "it"
        conversations = [_mark_learned(row, *_split_messages(row, form, counter), name)]
    if only_last:
        conversations = [(messages, _exclude_earlier(messages, unlearned)) for messages, unlearned in conversations]
    fields = {name for messages, _ in conversations for message in messages for name in message}
    counter.count(fields - _RENDERED, "a message")
    tools, arguments = _read_tools(row, form), _read_arguments(row, counter)
    parts = [
        {"messages": messages, "tools": tools, "arguments": arguments, "unlearned": unlearned}
        for messages, unlearned in conversations
    ]
    present = [{name: value for name, value in each.items() if value} for each in parts]
    normalized = dict(zip(SIDES, present, strict=True)) if form == PREFERENCE else present[0]
    return json.dumps(normalized, ensure_ascii=False, default=_describe_value)


_NAME_TEMPLATE = "name one with --data.chat-template"


def _are_texts(row: Mapping[str, Any], form: str, needed: bool) -> bool:
    """Return whether the prompt and the answers of a row are texts.

    Raises:
        Malformed: they must be, because there is no chat template, and something in the row is not.
    """
    parts = {name: row[name] for name in ("prompt", "completion", *SIDES) if name in row}
    texts = [name for name, value in parts.items() if isinstance(_parse_messages(value), str)]
    are_texts = form in TEXT_FORMS and len(texts) == len(parts)
    if not needed:
        return are_texts
    if form not in TEXT_FORMS or not texts:
        raise Malformed("with messages, which need a chat template", _NAME_TEMPLATE)
    if not are_texts:
        other = next(name for name in parts if name not in texts)
        detail = f"write both as texts, or {_NAME_TEMPLATE}"
        raise Malformed(f"with a {texts[0]} that is a text, and a {other} that is none", detail)
    if others := sorted(row.keys() & fields_of_form("messages") - FORMS["messages"]):
        raise Malformed(f"with the field {others[0]}, which needs a chat template", _NAME_TEMPLATE)
    return True


_JUDGEMENTS: dict[Any, bool] = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


def read_judgement(label: Any) -> bool:
    """Return whether an answer is desirable: a label that is true or false, 1 or 0, or such a text of a CSV file."""
    key = label.lower() if isinstance(label, str) else label
    if not isinstance(key, str | bool | int | float) or key not in _JUDGEMENTS:
        raise Malformed("with a label that is neither true nor false", f"it is {label!r}")
    return _JUDGEMENTS[key]


def normalize_prompt(row: Mapping[str, Any]) -> str:
    """Return a prompt and the other columns of its row as JSON text.

    Raises:
        Malformed: there is no prompt, or it is neither a text nor a list of messages.
    """
    prompt = _parse_messages(row.get("prompt"))
    if not prompt:
        raise Malformed("without a prompt", "--data.columns prompt=COLUMN names another column")
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(map(_is_message, prompt))):
        raise Malformed("with a prompt that is neither a text nor a list of messages")
    if isinstance(prompt, list) and prompt[-1].get("role") == "assistant":
        raise Malformed("with a prompt that ends with an answer")
    return json.dumps({**row, "prompt": prompt}, ensure_ascii=False, default=_describe_value)


def _mark_learned(row: dict[str, Any], context: Messages, answers: Messages, name: str) -> tuple[Messages, list[int]]:
    """Return the messages of a conversation, and the indices of the assistant's messages that are not learned.

    Args:
        row: its field `system` is the first message.
        context: the messages of which nothing is learned.
        answers: the messages after them.
        name: name of `answers`, for messages of errors.
    """
    messages = [{**message} for message in (*context, *answers)]  # two answers have the same context
    learns = [take_learned(message, message["role"] == "assistant") for message in messages]
    learns[: len(context)] = [False] * len(context)
    if "system" in row:
        if not isinstance(row["system"], str):
            raise Malformed("with a system field that is not text")
        if messages and messages[0]["role"] == "system":
            raise Malformed("with both a system field and a system message")
        messages, learns = [{"role": "system", "content": row["system"]}, *messages], [False, *learns]
    speaks = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not any(message["role"] == "assistant" for message in answers):
        roles = ", ".join(sorted({message["role"] for message in answers})) or "no message"
        raise Malformed("without an assistant message", f"{name} has {roles}")
    if not any(learns[index] for index in speaks):
        raise Malformed("without an assistant message that is learned")
    return messages, [index for index in speaks if not learns[index]]


def _exclude_earlier(messages: Messages, unlearned: list[int]) -> list[int]:
    """Return `unlearned` with all turns of the assistant that it does not hold but the last one."""
    speaks = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    last = max(index for index in speaks if index not in unlearned)
    return [index for index in speaks if index != last]


def _split_messages(row: dict[str, Any], form: str, counter: FieldCounter) -> tuple[Messages, Messages]:
    """Return the messages that are only context, and the messages whose assistant turns are learned."""
    if form in ("pairs", UNPAIRED):
        row = row | {name: _parse_messages(row[name]) for name in ("prompt", "completion")}
        return _read_turns(row, "prompt", "user", counter), _read_turns(row, "completion", "assistant", counter)
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


_MESSAGE_FIELDS = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})  # a message has those of one set


def _parse_messages(value: Any) -> Any:
    """Return the messages of which a text is the JSON, as a CSV file has them, or the value itself.

    An answer may be JSON too. It is a list of messages only if each item has the fields of a message.
    """
    if not isinstance(value, str):
        return value
    if value.startswith("[{'") and any(all(f"'{name}':" in value for name in names) for names in _MESSAGE_FIELDS):
        raise Malformed("with messages in Python's syntax", _PYTHON_SYNTAX)
    try:
        parsed = json_files.parse(value) if _JSON_MESSAGES.match(value) else None
    except ValueError:
        return value
    return parsed if isinstance(parsed, list) and all(map(_is_message, parsed)) else value


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and any(names <= item.keys() for names in _MESSAGE_FIELDS)


def _read_turns(row: dict[str, Any], name: str, role: str, counter: FieldCounter) -> Messages:
    """Return a field of a row as messages: a list of them, a single one, or a text that is one message of a role."""
    value = row[name]
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):  # as the answers in LLaMA-Factory's files
        value = [value]
    if not isinstance(value, list):
        raise Malformed(f"with a field {name} that is neither text nor a list of messages")
    return [_message(each, counter) for each in value]


_ANSWERS = tuple(f"the {side} answer" for side in SIDES)
_NO_PROMPT = "without a prompt, and with answers that have no common beginning"
_NAME_PROMPT = "--data.columns prompt=COLUMN names its column"
# Names that data sets give to the prompt. Texts may begin alike by chance, so it is not taken from the answers then.
_OTHER_PROMPTS = ("question", "instruction", "input", "query")
_LAST_WORD = re.compile(r" ?\w*$")


def _split_sides(row: dict[str, Any], counter: FieldCounter) -> tuple[Messages, Messages, Messages]:
    """Return the prompt, and the chosen and the rejected answer to it.

    If the field `prompt` is missing, or if an answer does not begin with the assistant's message, the answers are whole
    conversations. Their first messages, as far as they are the same, are the prompt. Each keeps its last message.
    """
    row = row | {name: _parse_messages(row[name]) for name in ("prompt", *SIDES) if name in row}
    others = [name for name in _OTHER_PROMPTS if row.get(name)]
    counter.count(others)
    if "prompt" not in row and all(isinstance(row[side], str) for side in SIDES):
        if others:
            raise Malformed("without a prompt", f"--data.columns prompt={others[0]} reads it from that column")
        size = _measure_prompt(*(row[side] for side in SIDES))
        row = {"prompt": row["chosen"][:size], **{side: row[side][size:] for side in SIDES}}
    prompt = _read_turns(row, "prompt", "user", counter) if row.get("prompt") else []
    chosen, rejected = (_read_turns(row, side, "assistant", counter) for side in SIDES)
    if chosen == rejected:
        raise Malformed("with a chosen answer that equals the rejected one")
    if prompt and all(message["role"] == "assistant" for message in (*chosen[:1], *rejected[:1])):
        return prompt, chosen, rejected
    size = count_common(chosen[:-1], rejected[:-1])
    context = chosen[:size]
    if not context:
        raise Malformed(_NO_PROMPT, _NAME_PROMPT)
    spoken, asked = ([(each["role"], each.get("content", "").strip()) for each in side] for side in (context, prompt))
    if not any(spoken[at : at + len(asked)] == asked for at in range(len(spoken))):
        raise Malformed("with a prompt that is not in its conversations", "--data.columns prompt= leaves it unread")
    return context, chosen[size:], rejected[size:]


def _measure_prompt(chosen: str, rejected: str) -> int:
    """Return the length of the common beginning of two texts. It does not end within a word, or with a space."""
    if not (prompt := _LAST_WORD.sub("", chosen[: count_common(chosen, rejected)])):
        raise Malformed(_NO_PROMPT, _NAME_PROMPT)
    return len(prompt)


def count_common(first: Sequence[Any], *others: Sequence[Any]) -> int:
    """Return the number of characters of texts, or of items of lists, that are the same at their beginning."""
    low, high = 0, min(len(first), *map(len, others))
    while low < high:  # a comparison of two slices is much faster than a loop over characters
        middle = (low + high + 1) // 2
        is_common = all(first[low:middle] == other[low:middle] for other in others)
        low, high = (middle, high) if is_common else (low, middle - 1)
    return low


def _read_tools(row: dict[str, Any], form: str) -> list[Any]:
    tools = []
    for tool in _parse(row.get("tools", []), list, "tools"):
        if isinstance(tool, str):  # a column of lists of texts, because tools differ in their fields
            tool = _parse(tool, dict, "a tool")
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
        message |= _join_parts(message)
    if message.get("tool_calls", "") == "":
        message.pop("tool_calls", None)
    else:
        message["tool_calls"] = _parse(message["tool_calls"], list, "tool_calls")
        if not all(isinstance(call, dict) for call in message["tool_calls"]):
            raise Malformed("with tool_calls that are not objects")
        message["tool_calls"] = [_check_arguments(call) for call in message["tool_calls"]]
    calls = message.get("tool_calls") or message.get("function_call")  # of the second, `take_learned` says what to do
    if not isinstance(message.get("content", "" if calls else None), str):
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


def _join_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a message as text, and the parts of reasoning at its start as a field.

    Such a part is {"type": "thinking", "thinking": TEXT OR LIST OF PARTS}, as Mistral's files have it.
    """
    parts, thoughts = list(message["content"]), []
    while (
        message["role"] == "assistant" and parts and isinstance(parts[0], dict) and parts[0].get("type") == "thinking"
    ):
        thought = parts.pop(0).get("thinking")
        thoughts.append("".join(map(_text, thought)) if isinstance(thought, list) else thought)
    joined = {"content": "".join(map(_text, parts))}
    if not thoughts:
        return joined
    if not all(isinstance(thought, str) for thought in thoughts):
        raise Malformed("with a part of a message whose thinking is not text")
    if named := sorted({"reasoning_content", "reasoning", "thinking"} & message.keys()):
        raise Malformed(f"with both a part of type thinking and the field {named[0]}")
    return {**joined, "reasoning_content": "".join(thoughts)}


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
