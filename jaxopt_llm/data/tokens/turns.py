"""Conversations in the text that a chat template writes: where the assistant's turns lie, and what is left out.

The template is a function that is only called: this file compares its texts for parts of a conversation, with and
without the generation prompt, and with probes in place of what was written.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxopt_llm.data.reading.conversation import count_common

Message = dict[str, Any]
# Text of messages and tools. The last argument: whether the generation prompt follows. Refused if the template rejects.
Render = Callable[[Sequence[Message], Sequence[Any] | None, bool], str]
Document = tuple[str, list[tuple[int, int]]]  # text, and the ranges of characters that are learned

REASONING = ("reasoning_content", "thinking", "reasoning")  # fields of a message, as in transformers
PROBES = tuple(f"{letter}{secrets.token_hex(8)}" for letter in "qz")  # texts that no conversation contains
_EXAMPLE = [{"role": "user", "content": PROBES[1]}, {"role": "assistant", "content": PROBES[0]}]
# Some templates require a system message, and others reject it.
EXAMPLES = (_EXAMPLE, [{"role": "system", "content": PROBES[1]}, *_EXAMPLE])
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
_TOOL = {"type": "function", "function": {"name": "x", "description": "x", "parameters": _PARAMETERS}}
_BLOCKS = "put generation blocks around the assistant's text in a copy of the template"
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


class Refused(Exception):
    """Exception for a conversation that the template rejects or cannot write, or in whose text a turn is not found."""


class Lost(Exception):
    """Exception for a conversation from which the template leaves out a part.

    The arguments are a phrase that also describes several such conversations, and more about this one.
    """


@dataclass(frozen=True)
class Turn:
    """Turn of the assistant, as the model is served.

    Attributes:
        document: the conversation up to and including the turn, and what the template writes after it.
        text: the document up to and including the token that ends the turn.
        start: index in the text at which the model takes over.
        joined: whether the document is the prompt and a turn that the template writes only after another text.
    """

    document: str
    text: str
    start: int
    joined: bool = False


@dataclass(frozen=True)
class Ending:
    """Text that a template writes after the assistant's answer.

    Attributes:
        epilogue: text of the last turn of a conversation after the token that ends the turn.
        following: special token, after whitespace, that begins the user's next turn and so ends an answer; empty if
            the template ends an answer with a token of its own.
        is_known: False if the template rejects every example.
    """

    epilogue: str = ""
    following: str = ""
    is_known: bool = True


@dataclass(frozen=True)
class Frame:
    """Texts that a template writes in an answer, after the generation prompt.

    Attributes:
        opening: before the reasoning.
        middle: between the reasoning and the content.
        plain: before the content of an answer without reasoning.
    """

    opening: str = ""
    middle: str = ""
    plain: str = ""

    def split(self, answer: str) -> tuple[str, str]:
        """Return the reasoning and the content of an answer that a model wrote, with its special tokens."""
        opening, middle, plain = (text.strip() for text in (self.opening, self.middle, self.plain))
        if middle and middle in answer:
            reasoning, _, content = answer.partition(middle)
            return reasoning.strip().removeprefix(opening).strip(), content.lstrip("\n")
        begins = plain and answer.lstrip().startswith(plain)
        return "", answer.lstrip().removeprefix(plain).lstrip("\n") if begins else answer


class Specials:
    """Special tokens of a tokenizer in texts.

    eos: the token that the tokenizer declares as the end of a text.
    """

    def __init__(self, tokens: Sequence[str], eos: str) -> None:
        self.eos = eos
        self._tokens = {token for token in tokens if token}
        self._lengths = sorted({len(token) for token in self._tokens}, reverse=True)
        escaped = "|".join(map(re.escape, sorted(self._tokens, key=lambda token: (-len(token), token))))
        self._pattern = re.compile(escaped or "(?!)")
        # Tokens such as <think> are not special, but one token too.
        self._whole = re.compile(rf"{escaped}|</?\w+>" if escaped else r"</?\w+>")
        self._longest = max(self._lengths, default=0) + 32

    def end(self, text: str) -> str:
        """Return the special token that ends a text, or an empty text."""
        ends = (text[-length:] for length in self._lengths)
        return next((end for end in ends if end in self._tokens), "")

    def remove(self, text: str) -> str:
        """Return a text without its special tokens."""
        return self._pattern.sub("", text)

    def following(self, text: str, index: int) -> str:
        """Return the special token at an index of a text, with the whitespace before it, or an empty text."""
        begin = index + len(text[index:]) - len(text[index:].lstrip())
        found = self._pattern.match(text, begin)
        return text[index : found.end()] if found else ""

    def last(self, text: str) -> int:
        """Return the index of the last special token of a text, or -1."""
        return max((found.start() for found in self._pattern.finditer(text)), default=-1)

    def common(self, *texts: str) -> int:
        """Return the length of the longest common prefix of texts that does not end inside a token such as <think>."""
        length = count_common(*texts)
        for text in texts:
            for found in self._whole.finditer(text, max(0, length - self._longest), length + self._longest):
                if found.start() < length < found.end():
                    return self.common(*(each[: found.start()] for each in texts))
        return length


def alter(message: Message, probe: str) -> Message:
    """Return a message in which a probe replaces what was written: the content, the reasoning, the called functions."""
    fields = [name for name in ("content", *REASONING) if isinstance(message.get(name), str)]
    changed: Message = {name: probe for name in fields if message[name] or not message.get("tool_calls")}
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [rename(call, probe) for call in calls]
    return {**message, **changed}


def mark(message: Message, probe: str) -> Message:
    """Return a message with a probe after each text: the content, the reasoning, the names of called functions.

    The texts themselves stay, because a template may test how they begin or what they contain.
    """
    changed: Message = {}
    for name in ("content", *REASONING):
        value = message.get(name)
        if isinstance(value, str) and value.strip():
            changed[name] = value + probe
        elif isinstance(value, list):
            changed[name] = [_mark_part(part, probe) for part in value]
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [_mark_call(call, probe) for call in calls]
    return {**message, **(changed or {"content": probe})}


def _mark_part(part: Any, probe: str) -> Any:
    is_text = isinstance(part, dict) and isinstance(part.get("text"), str)
    return {**part, "text": part["text"] + probe} if is_text else part


def _mark_call(call: Any, probe: str) -> Any:
    functions = _functions({"tool_calls": [call]})
    return rename(call, f"{functions[0].get('name')}{probe}") if functions else call


def describe(tool: Any, probe: str) -> Any:
    """Return a tool with a probe after its description."""
    if not isinstance(tool, dict):
        return tool
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": describe(tool["function"], probe)}
    return {**tool, "description": f"{tool.get('description', '')}{probe}"}


def find_owners(
    text: str, blocks: Sequence[tuple[int, int]], roles: Sequence[str], marks: Sequence[str]
) -> list[set[int]]:
    """Return the messages of the assistant to which each generation block belongs.

    These are the messages whose marks are in the block. A block without a mark, as around a token that ends a turn,
    belongs to the messages of the assistant next to it.

    Args:
        text: text of the conversation with a mark in each message.
        blocks: ranges of the blocks.
        roles: roles of the messages.
        marks: marks of the messages.
    """
    places = sorted((found.start(), i) for i, each in enumerate(marks) for found in re.finditer(re.escape(each), text))
    owners = []
    for begin, end in blocks:
        inside = {i for place, i in places if begin <= place < end}
        before = [i for place, i in places if place < begin][-1:]
        after = [i for place, i in places if place >= end][:1]
        owners.append(inside or {i for i in before + after if roles[i] == "assistant"})
    return owners


def rename(tool: Any, name: str) -> Any:
    """Return a tool, or a call of one, with another name of the function."""
    if not isinstance(tool, dict):
        return tool
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": {**tool["function"], "name": name}}
    return {**tool, "name": name}


def find_reasoning(message: Message) -> list[str]:
    """Return the reasoning of a message: a field, or the part of the content between <think> and </think>."""
    found = [message[name] for name in REASONING if isinstance(message.get(name), str)]
    content = message.get("content")
    thought = _THOUGHT.match(content) if isinstance(content, str) else None
    return [text.strip() for text in (*found, *(thought.groups() if thought else ())) if text.strip()]


def find_ending(render: Render, specials: Specials, has_tools: bool) -> Ending:
    """Return what the template writes after an answer: an example with a next turn and one without it are compared."""
    if (texts := _render_example(render, has_tools)) is None:
        return Ending(is_known=False)
    last, inner = (text.rpartition(PROBES[0])[2] for text in texts)
    common = specials.common(last, inner)
    if specials.eos and (found := last[:common].find(specials.eos)) >= 0:
        return Ending(epilogue=last[found + len(specials.eos) :])
    if specials.end(last[:common].rstrip()):
        return Ending(epilogue=last[common:])
    if specials.end(last.rstrip()):
        return Ending()
    return Ending(following=specials.following(inner, len(last[:common].rstrip())))


def _render_example(render: Render, has_tools: bool) -> tuple[str, str] | None:
    """Return the text of an example, and its text with a next turn, or None if the template rejects every example.

    A template may reject an example without a system message, or the tool of the example. If it rejects the next turn
    in every example, as templates of a single turn do, the two texts are the same.
    """
    single = None
    for tools in ([_TOOL], None) if has_tools else (None,):
        for example in EXAMPLES:
            try:
                text = render(example, tools, False)
                single = single or (text, text)
                return text, render([*example, _EXAMPLE[0]], tools, True)
            except Refused:
                continue
    return single


def find_frame(render: Render) -> Frame:
    """Return what the template writes around the parts of an answer: nothing if its prompt does not precede them."""
    for *before, answer in EXAMPLES:
        try:
            prompt = render(before, None, True)
            plain = render([*before, answer], None, False)
            reasoned = render([*before, {**answer, "thinking": PROBES[1], "reasoning_content": PROBES[1]}], None, False)
        except Refused:
            continue
        beginning, found, _ = plain.removeprefix(prompt).partition(PROBES[0])
        frame = Frame(plain=beginning if found and plain.startswith(prompt) else "")
        opening, _, rest = reasoned.removeprefix(prompt).partition(PROBES[1])
        middle, found, _ = rest.partition(PROBES[0])
        return replace(frame, opening=opening, middle=middle) if found and reasoned.startswith(prompt) else frame
    return Frame()


def fit_arguments(render: Render, messages: list[Message], tools: Sequence[Any] | None) -> list[Message]:
    """Return messages whose tool calls have their arguments in the form that the template expects.

    Some templates write the JSON of an object, and would write the JSON of a JSON text, with quotes. Others write a
    text as it is, and cannot write an object. Gemma 4's writes an object in a syntax of its own, and would write a text
    within the braces of that syntax. A probe in place of the arguments shows what the template does.
    """

    def write(arguments: Any) -> str:
        try:
            return render(_map_arguments(messages, lambda _: arguments), tools, False)
        except Refused:
            return ""

    key, value = PROBES
    given = [call["arguments"] for message in messages for call in _functions(message) if "arguments" in call]
    texts = [arguments for arguments in given if isinstance(arguments, str)]
    if not given:
        return messages
    written = write({key: value})
    takes_object = value in written and f"'{key}'" not in written  # quotes of Python
    is_json = re.search(rf'"{key}":\s*"{value}"', written) is not None
    if texts and ((takes_object and not is_json) or f'{{"{key}":  1}}' not in write(f'{{"{key}":  1}}')):
        return _map_arguments(messages, lambda given: json.loads(given) if isinstance(given, str) else given)
    if len(texts) < len(given) and not takes_object:
        return _map_arguments(messages, _encode_json)
    return messages


class Conversation:
    """Conversation in the text of a template.

    Args:
        render: renders messages.
        messages: the conversation.
        tools: its tools.
        specials: special tokens, which can end a turn.
    """

    def __init__(
        self, render: Render, messages: Sequence[Message], tools: Sequence[Any] | None, specials: Specials
    ) -> None:
        self._template, self._messages, self._tools, self._specials = render, messages, tools, specials
        self._rendered: dict[tuple[int, bool], str] = {}

    def render_first(self, count: int, prompts: bool = False) -> str:
        """Return the text of the first messages. prompts: whether the generation prompt follows."""
        if (count, prompts) not in self._rendered:
            self._rendered[count, prompts] = self._render(self._messages[:count], prompts)
        return self._rendered[count, prompts]

    def _render(self, messages: Sequence[Message], prompts: bool = False) -> str:
        return self._template(messages, self._tools, prompts)

    # ---- Turns.

    def find_documents(self, learned: Sequence[int], ending: Ending) -> list[Document]:
        """Return the documents in which the learned turns are as the model is served.

        This is the whole conversation if it shows each turn as it was served. Otherwise the template rewrites earlier
        turns when more turns follow. Then there is one document for each group of turns of which the last one shows
        the others as they were served.
        """
        turns = {index: self.read_turn(index, ending) for index in learned}
        last = turns.get(len(self._messages) - 1)
        whole = self.render_first(len(self._messages)) if last is None else last.document
        spans = {index: (turn.start, len(turn.text)) for index, turn in turns.items() if whole.startswith(turn.text)}
        moved = {index: self._locate(index, turn, whole) for index, turn in turns.items() if index not in spans}
        if all(moved.values()):
            return [(whole, sorted(span for span in (*spans.values(), *moved.values()) if span))]
        documents = [(whole, sorted(spans.values()))] if spans else []
        rest = [turn for index, turn in turns.items() if index not in spans]
        while rest:
            text = rest[-1].document
            documents.append((text, [(turn.start, len(turn.text)) for turn in rest if text.startswith(turn.text)]))
            rest = [turn for turn in rest if not text.startswith(turn.text)]
        return documents[::-1]

    def read_turn(self, index: int, ending: Ending) -> Turn:
        """Return a turn as the model is served."""
        try:
            prompt = self.render_first(index, prompts=True)
        except Refused as error:
            if index > 0:
                raise
            raise Refused(f"the assistant begins it, and there is no prompt without messages: {error}") from None
        whole = self.render_first(index + 1)
        start = turn = len(prompt)
        if joined := not whole.startswith(prompt):
            start, turn = self._find_start(index, prompt, whole)
            joined = start == len(prompt)
        self._check_is_alone(index, whole[turn:], joined)
        whole = prompt + whole[turn:] if joined else whole
        text = whole.removesuffix(ending.epilogue)
        stripped = text.rstrip()
        if self._specials.end(stripped) and len(stripped) > start:
            text = stripped
        elif following := self._find_following(index, stripped, ending):
            text = stripped + following
        elif not ending.is_known:
            raise Refused("no token that ends the turn is found, and it rejects the examples that would show one")
        return Turn(whole if whole.startswith(text) else text, text, start, joined)

    def _find_start(self, index: int, prompt: str, whole: str) -> tuple[int, int]:
        """Return where the model takes over if the rendering of a turn does not begin with its prompt.

        This is where the rendering leaves the generation prompt: an index of the rendering, twice. Text that is the
        same for two probes in place of the answer is the template's own.

        Some templates write the messages before the turn in another way with the turn than without it. Mistral's
        leave out the system message. Then the result is the length of the prompt, and the index of the turn in the
        rendering, where the same generation prompt or the same last special token precedes the answer.
        """
        before, message = self._messages[:index], self._messages[index]
        probed = [self._render([*before, alter(message, probe)]) for probe in PROBES]
        start, opening = self._specials.common(prompt, whole, *probed), self._find_opening(index)
        if opening == len(prompt) and whole.endswith(prompt[start:]):
            # Command R7B's with tools writes a generation prompt at the end of any text: it begins where a question
            # would differ from it, and some of it must precede the turn.
            asked = self._try([*before, _EXAMPLE[0]], self._tools) or prompt
            if start > self._specials.common(prompt, asked):
                return start, start
        last = self._specials.last(prompt)
        header = prompt[opening:] or (prompt[last:] if last >= 0 else "")
        found = whole.rfind(header, 0, self._specials.common(whole, *probed)) if header else -1
        if start > opening or (start == opening and found < 0):
            return start, start
        if found < 0:
            problem = "it writes the messages before an assistant's turn differently with and without the turn"
            raise Refused(f"{problem}; {_BLOCKS}")
        return len(prompt), found + len(header)

    def _check_is_alone(self, index: int, turn: str, joined: bool) -> None:
        """Raise Refused if the text of a turn contains a part of an earlier message or of a tool.

        The turn must not change with marks in the earlier messages and in the tools. A template that rejects the marks
        gives no proof. Then a turn is only accepted where the prompt precedes it.
        """
        before = [mark(message, PROBES[0]) for message in self._messages[:index]]
        tools = self._tools and [describe(tool, PROBES[0]) for tool in self._tools]
        marked = self._try([*before, self._messages[index]], tools)
        if joined if marked is None else not marked.endswith(turn):
            problem = "it writes an assistant's turn together with earlier messages, so the turn cannot be told apart"
            raise Refused(f"{problem}; {_BLOCKS}")

    def _find_opening(self, index: int) -> int:
        return self._specials.common(self.render_first(index, prompts=True), self.render_first(index))

    def _find_following(self, index: int, text: str, ending: Ending) -> str:
        """Return the special token that follows a turn, with whitespace before it, or an empty text."""
        if index + 1 < len(self._messages):
            longer = self.render_first(index + 2)
            if longer.startswith(text):
                return self._specials.following(longer, len(text))
        if not self._messages[index].get("tool_calls"):
            return ending.following
        longer = self._try([*self._messages[: index + 1], _answer(self._messages[index])], self._tools) or ""
        return self._specials.following(longer, len(text)) if longer.startswith(text) else ""

    def _locate(self, index: int, turn: Turn, whole: str) -> tuple[int, int] | None:
        """Return the range of a turn in the whole conversation, or None if its text is not that of the served turn.

        A probe in place of the answer shows where the answer begins, in the served turn and in the whole conversation.
        """
        if turn.joined:
            return None
        opening, rendering = self._find_opening(index), self.render_first(index + 1)
        before, message, after = self._messages[:index], self._messages[index], self._messages[index + 1 :]
        places = set()
        for probe in PROBES:
            served, longer = (self._render([*before, alter(message, probe), *rest]) for rest in ((), after))
            places.add(opening + count_common(longer, whole) - count_common(served, rendering))
        begin = places.pop()
        text = turn.text[opening:]
        if places or begin < 0 or not whole.startswith(text, begin):
            return None
        return begin + turn.start - opening, begin + len(text)

    # ---- Parts that the template leaves out.

    def check_parts(self, learned: Sequence[int]) -> None:
        """Raise Lost if a part of the conversation leaves no trace in the text.

        Probes in place of all parts are looked for in one text. A part whose probe is missing is lost if the text does
        not change with the part. Reasoning only counts in learned turns: templates drop it in earlier ones by design.
        """
        parts = [*self._list_parts()]
        messages, tools = self._messages, self._tools
        for number, part in enumerate(parts):
            messages, tools = part.replace(messages, tools, f"{PROBES[0]}-{number}-")
        text = self._try(messages, tools) or ""
        for number, part in enumerate(parts):
            if f"{PROBES[0]}-{number}-" not in text and self._is_lost(part, learned):
                raise Lost(part.reason, part.detail)
        for index in learned:
            turn = self.render_first(index + 1)
            for reasoning in find_reasoning(self._messages[index]):
                part = Trace("with reasoning that the chat template leaves out", index, reasoning=reasoning)
                if reasoning not in turn and self._is_lost(part, learned):
                    raise Lost(part.reason, part.detail)

    def is_shortened(self, index: int) -> bool:
        """Return whether the template drops the reasoning of a turn, or its text beside calls, when messages follow."""
        message, turn, whole = (
            self._messages[index],
            self.render_first(index + 1),
            self.render_first(len(self._messages)),
        )
        beside = message.get("content") if message.get("tool_calls") else None
        texts = [*find_reasoning(message), *([beside.strip()] if isinstance(beside, str) else [])]
        return any(text in turn and text not in whole for text in texts)

    def _list_parts(self) -> Iterator["Trace"]:
        for index, message in enumerate(self._messages):
            calls = message.get("tool_calls") or []
            if isinstance(message.get("content"), str) and message["content"].strip():
                reason = "with a message that the chat template leaves out"
                beside = "with text beside tool calls that the chat template leaves out"
                yield Trace(beside if calls else reason, index, detail=f"its role is {message.get('role')}")
            for call in range(len(calls)):
                yield Trace("with tool calls that the chat template leaves out", index, call=call)
        for tool in range(len(self._tools or ())):
            yield Trace("with tools that the chat template leaves out", tool=tool)

    def _is_lost(self, part: "Trace", learned: Sequence[int]) -> bool:
        """Return whether no text changes with the part: that of the conversation, and the prompt of the last turn."""
        texts = [(len(self._messages), False), (max(learned, default=0), True)]
        if part.message is not None and self._messages[part.message].get("role") == "assistant":
            texts = [(part.message + 1, False)]
        messages, tools = part.replace(self._messages, self._tools, PROBES[0])
        return all(
            self._try(messages[:count], tools, prompts) == self.render_first(count, prompts) for count, prompts in texts
        )

    def _try(self, messages: Sequence[Message], tools: Sequence[Any] | None, prompts: bool = False) -> str | None:
        try:
            return self._template(messages, tools, prompts)
        except Refused:
            return None


@dataclass(frozen=True)
class Trace:
    """Part of a conversation: a tool, a tool call of a message, its reasoning, or else its content."""

    reason: str
    message: int | None = None
    call: int | None = None
    tool: int | None = None
    reasoning: str = ""
    detail: str = ""

    def replace(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, probe: str
    ) -> tuple[Sequence[Message], Sequence[Any] | None]:
        """Return the messages and tools with a probe in place of the part."""
        if self.tool is not None:
            return messages, [rename(each, probe) if i == self.tool else each for i, each in enumerate(tools or ())]
        assert self.message is not None
        message = messages[self.message]
        if self.call is not None:
            calls = [rename(each, probe) if i == self.call else each for i, each in enumerate(message["tool_calls"])]
            message = {**message, "tool_calls": calls}
        elif self.reasoning:
            texts = {name: message[name] for name in ("content", *REASONING) if isinstance(message.get(name), str)}
            message = {**message, **{name: text.replace(self.reasoning, probe) for name, text in texts.items()}}
        else:
            message = {**message, "content": probe}
        return [*messages[: self.message], message, *messages[self.message + 1 :]], tools


def _functions(message: Message) -> list[Message]:
    """Return the functions that a message calls, each with its name and arguments."""
    calls = [call for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    return [call["function"] if isinstance(call.get("function"), dict) else call for call in calls]


def _answer(message: Message) -> Message:
    """Return a result of the first call of a message."""
    call, (function, *_) = message["tool_calls"][0], _functions(message)
    return {"role": "tool", "content": PROBES[1], "tool_call_id": call.get("id", ""), "name": function.get("name")}


def _encode_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _map_arguments(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    """Return messages with changed arguments of tool calls."""

    def convert(call: Any) -> Any:
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            return {**call, "function": convert(call["function"])}
        return (
            {**call, "arguments": change(call["arguments"])} if isinstance(call, dict) and "arguments" in call else call
        )

    return [
        {**message, "tool_calls": [*map(convert, message["tool_calls"])]} if message.get("tool_calls") else message
        for message in messages
    ]
