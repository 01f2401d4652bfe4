"""Settings of the training data and of the tokenizer."""

from dataclasses import dataclass
from datetime import date
from typing import Any, Final, Literal

from jaxopt_llm.config.metadata import NON_NEGATIVE, Bounds, Section, setting
from jaxopt_llm.core import json_files

Format = Literal["auto", "text", "jsonl", "json", "csv", "parquet", "arrow", "prepared", "megatron", "numpy"]
Content = Literal["text", "chat", "messages", "pairs", "sharegpt", "alpaca", "preference", "unpaired", "prompt"]
PREFERENCE: Final = "preference"
UNPAIRED: Final = "unpaired"
# Kinds of pairs of documents. preference: a chosen document, then the rejected one. unpaired: a document with a judged
# answer, then its prompt with the answer to another prompt.
Pairs = Literal["", "preference", "unpaired"]
LongDocuments = Literal["auto", "split", "cut", "drop"]
# What a run directory keeps of the files that these settings name.
TOKENIZER_FOLDER = "tokenizer"
TEMPLATE_FILE = "chat_template.jinja"
NO_TEMPLATE: Final = "none"  # of data.chat_template

# Names that a chat template gets from elsewhere, or that are arguments of apply_chat_template in transformers.
RESERVED_ARGUMENTS = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", "conversation", "chat_template", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "sanitize_control_tokens"),
    )
)

# Fields that a row of each form of conversations must have, and fields that are used if a row has them.
FORMS: dict[str, frozenset[str]] = {
    "messages": frozenset({"messages"}),
    "pairs": frozenset({"prompt", "completion"}),
    "sharegpt": frozenset({"conversations"}),
    "alpaca": frozenset({"instruction", "output"}),
    "preference": frozenset({"chosen", "rejected"}),
    "unpaired": frozenset({"prompt", "completion", "label"}),
}
TEXT_FORMS = ("pairs", PREFERENCE, UNPAIRED)  # forms of rows that may be texts, which need no template
PROMPT = "prompt"  # the content of rows that are prompts: a field of that name, and columns for functions of the user
_OPTIONAL = frozenset({"tools", "system", "chat_template_kwargs", "parallel_tool_calls"})
_OPTIONAL_IN_FORM = {"alpaca": frozenset({"input", "history"}), "preference": frozenset({"prompt"})}


def fields_of_form(form: str) -> frozenset[str]:
    """Return the fields of a row that a form of conversations uses."""
    return FORMS[form] | _OPTIONAL | _OPTIONAL_IN_FORM.get(form, frozenset())


@dataclass(frozen=True)
class DataConfig(Section, path="data"):
    paths: tuple[str, ...] = setting((), resume="freely", is_place=True)
    """Files, folders, globs or URLs (s3://, gs://, hf://) to read; each is one source. Empty = the source code of
    Python's standard library."""
    weights: tuple[float, ...] = ()
    """Share of the rows that each of data.paths gives, relative to the sum of the weights. Empty = an epoch reads every
    token once."""
    format: Format = "auto"
    """Format of the files. auto: by suffix; json: one array of objects, or one object per line; arrow: files of Apache
    Arrow, such as those of a folder of datasets.save_to_disk; prepared: the output of jaxopt_llm.prepare; megatron: a
    .bin/.idx pair; numpy: a one-dimensional .npy of token ids."""
    separator: str = ""
    """Text between two documents of a text file, for example <|endoftext|>. Empty = each file is one document. A
    document may have up to 1 GiB."""
    text_field: str = "text"
    """Column of JSONL, JSON, CSV, Parquet and Arrow files that holds the text."""
    label_field: str = ""
    """Column of JSONL, JSON, CSV, Parquet and Arrow files that holds the label of a row, for objectives over scores
    (docs/rewards.md): a class, counted from 0, or a number; of a pair of answers, its margin. Every row must have one.
    Empty = none."""
    label_names: tuple[str, ...] = ()
    """Names of the classes of training.objective=classify, in the order of their numbers, for labels that are texts.
    Empty = those of a model.pretrained with classes (id2label), of a prepared folder or of a feature ClassLabel of
    datasets; otherwise the texts of the column, sorted. The start of the run resolves them."""
    columns: tuple[str, ...] = ()
    """Columns of conversations that have other names, as FIELD=COLUMN: messages=dialog tools=functions. FIELD is a
    field of a form of data.content. NAME= leaves the column NAME unread, whatever it holds."""
    content: Content = "text"
    """Content of a row of a JSONL, JSON, CSV, Parquet or Arrow file: text, or a conversation. The chat template renders
    a conversation as text, and the loss counts only the assistant's tokens. messages: a list of role and content;
    pairs: prompt and completion, each a text or a list of messages; sharegpt: conversations, a list of from and value;
    alpaca: instruction, input and output; preference: chosen and rejected, two answers to the same prompt; unpaired:
    prompt, completion and label, an answer that is desirable or not, or chosen and rejected, which are then one answer
    of each kind; chat: detect the form from the fields of each file, but not unpaired. Beside conversations, chat also
    reads files of texts, which have data.text_field and no form. prompt: a prompt without an answer, a text or a list
    of messages, whose other columns go to rollouts.rewards (docs/grpo.md)."""
    learn_turns: Literal["all", "last"] = "all"
    """Turns of the assistant that are learned in a conversation. all: all of them; last: the last one. Fields of
    messages such as weight 0 exclude turns from both (docs/chat.md)."""
    chat_template: str = setting("", is_place=True)
    """File with a chat template in Jinja, or the name of one of several templates of data.tokenizer. none: no template;
    a prompt and its answer are texts, which are joined as they are. Empty = the tokenizer's template, if there is one;
    of several, tool_use for conversations with tools, and default for others."""
    template_arguments: tuple[str, ...] = ()
    """Variables of the chat template, each as NAME=VALUE with VALUE in JSON or as plain text, for example
    enable_thinking=false. The field chat_template_kwargs of a row overrides them."""
    date: str = ""
    """Current date for chat templates that write it, for example 2026-01-31. Empty = none."""
    long_documents: LongDocuments = "auto"
    """Treatment of documents longer than a row. split: documents continue in the next row, and each row treats its
    part as a separate document; cut: rows hold whole documents, and only the first part of a longer document is kept;
    drop: rows hold whole documents, and longer documents are dropped; auto: drop for pairs of answers, which are never
    divided, cut for other conversations, split otherwise."""
    documents_per_row: int = setting(0, bounds=NON_NEGATIVE)
    """Maximum number of documents in a row; the rest of the row is padding. A pair of answers is two documents. 0 = no
    limit, except that with training.attention=cudnn the start of the run sets one of 1 to 16, the smallest that adds
    hardly any padding."""
    tokenizer: str = setting("auto", resume="freely", is_place=True)
    """Tokenizer: bytes (256 bytes plus BOS and EOS), the path of a Hugging Face tokenizer.json or its folder, or the id
    of a model on the Hugging Face hub. auto: the tokenizer of model.pretrained, or bytes if there is none."""
    bos: str = ""
    """Token before each document (BOS). Empty = what `transformers` adds with this tokenizer, which may be nothing."""
    eos: str = ""
    """Token after each document (EOS). Empty = the tokenizer's own."""
    malformed: Literal["error", "skip", "replace"] = "error"
    """Treatment of malformed rows: not UTF-8, not valid JSON, without text, no conversation. error: stop the command;
    skip: skip them and count them by reason; replace: replace invalid UTF-8 by U+FFFD, and skip the other rows."""
    held_out: float = setting(0.05, bounds=Bounds(above=0, below=1))
    """Share of the documents that is held out of training for evaluation, above 0 and below 1."""

    @property
    def uses_bytes(self) -> bool:
        """Use of the byte tokenizer. `resolve_pretrained` replaces `auto` if there is a pretrained model."""
        return self.tokenizer in ("auto", "bytes")

    @property
    def names_template(self) -> bool:
        """True if data.chat_template names a template."""
        return self.chat_template not in ("", NO_TEMPLATE)

    @property
    def has_labels(self) -> bool:
        """True if each document gets a label."""
        return bool(self.label_field) or self.content == UNPAIRED

    def column_names(self) -> dict[str, str]:
        """Return the column of each field that data.columns names; empty for a column that is not read."""
        return dict((name, column) for name, _, column in (text.partition("=") for text in self.columns))

    def problems(self) -> list[str]:
        found = self.find_out_of_range() + self._find_wrong_columns()
        if self.content == "text":
            of_templates = ("chat_template", "template_arguments", "date")
            remedy = "remove it, or set data.content=chat"
            found += [
                f"data.{name} applies only to conversations: {remedy}" for name in of_templates if getattr(self, name)
            ]
        if self.chat_template == NO_TEMPLATE and (self.template_arguments or self.date):
            found.append(
                "data.chat_template=none: leave data.template_arguments and data.date out, which a template reads"
            )
        found += find_argument_problems("data.template_arguments", self.template_arguments)
        if self.content == "text" and self.learn_turns != "all":
            remedy = "also set data.content=chat"
            found.append(f"data.learn_turns={self.learn_turns} applies only to conversations: {remedy}")
        if self.content != "text" and not self.paths:
            found.append(f"data.content={self.content}: there are no files to read; name them with data.paths")
        if self.content == UNPAIRED and self.label_field:
            remedy = f"set --data.label-field '' and --data.columns label={self.label_field}"
            found.append(f"data.label_field={self.label_field}: data.content=unpaired reads the field label: {remedy}")
        if len({*self.label_names}) < len(self.label_names):
            found.append(f"data.label_names={' '.join(self.label_names)}: a class is named twice; name each once")
        if self.date and not _is_date(self.date):
            found.append(f"data.date={self.date}: not a date; write it as in 2026-01-31")
        weights, paths = len(self.weights), len(self.paths)
        if weights and weights != paths:
            found.append(f"data.weights has {weights} values for {paths} data.paths: give one weight for each path")
        repeated = ", ".join(sorted({path for path in self.paths if self.paths.count(path) > 1}))
        if repeated:
            remedy = "name each path once, with a larger weight in data.weights"
            found.append(f"data.paths names {repeated} more than once: {remedy}")
        if any(weight < 0 for weight in self.weights):
            found.append(f"data.weights={self.weights}: weights must not be negative")
        elif self.weights and not any(self.weights):
            found.append("data.weights: all weights are 0, so no data would be read; give a source a positive weight")
        return found

    def _find_wrong_columns(self) -> list[str]:
        known = sorted(frozenset().union(*map(fields_of_form, FORMS)))
        found, names, columns = [], self.column_names(), [column for column in self.column_names().values() if column]
        for text in self.columns:
            name, is_pair, column = text.partition("=")
            if not (name and is_pair):
                found.append(f"data.columns: {text}: write FIELD=COLUMN, as in messages=dialog")
            elif column and column == self.label_field:
                found.append(f"data.columns: {text}: data.label_field reads this column; name it once")
            elif column and name == "text":
                found.append(f"data.columns: {text}: name the column of texts with data.text_field={column}")
            elif column and name not in known:
                found.append(
                    f"data.columns: {text}: {name} is not a field of a conversation; use one of {', '.join(known)}"
                )
            elif columns.count(column) > 1:
                found.append(f"data.columns: {text}: another field has the column {column} too; name it once")
        if len(names) < len(self.columns):
            found.append(f"data.columns={' '.join(self.columns)}: a field is named twice; name each field once")
        return found


def parse_arguments(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return the variables of a chat template, each written as NAME=VALUE. A value that is not JSON is a text."""
    parsed = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        try:
            parsed[name] = json_files.parse(value)
        except ValueError:
            parsed[name] = value
    return parsed


def find_argument_problems(setting: str, arguments: tuple[str, ...]) -> list[str]:
    """List the problems of variables of a chat template. setting: its name, for the messages."""
    names = [argument.partition("=")[0] for argument in arguments]
    found = []
    for argument, name in zip(arguments, names, strict=True):
        if not name.isidentifier() or "=" not in argument:
            found.append(f"{setting}: {argument}: must be NAME=VALUE, as in enable_thinking=false")
        elif name in RESERVED_ARGUMENTS:
            found.append(f"{setting}: {argument}: the name {name} is reserved; leave it out")
        elif names.count(name) > 1:
            found.append(f"{setting}: {argument}: {name} has several values; give one")
    return found


def _is_date(day: str) -> bool:
    try:
        return date.fromisoformat(day).isoformat() == day
    except ValueError:
        return False
