"""Settings of the training data and of the tokenizer."""

from dataclasses import dataclass
from datetime import date
from typing import Literal

from jaxopt_llm.config.metadata import NON_NEGATIVE, POSITIVE, Bounds, find_out_of_range, setting

Format = Literal["auto", "text", "jsonl", "json", "csv", "parquet", "prepared", "megatron", "numpy"]
Content = Literal["text", "chat", "messages", "pairs", "sharegpt", "alpaca"]
LongDocuments = Literal["auto", "split", "cut", "drop"]


@dataclass(frozen=True)
class DataConfig:
    paths: tuple[str, ...] = setting((), resume="freely")
    """Files, folders, globs or URLs (s3://, gs://, hf://) to read; each is one source. Empty = the source code of
    Python's standard library."""
    weights: tuple[float, ...] = ()
    """Share of the rows that each of data.paths gives, relative to the sum of the weights. Empty = an epoch reads every
    token once."""
    format: Format = "auto"
    """Format of the files. auto: by suffix; json: one array of objects, or one object per line; prepared: the
    output of jaxopt_llm.prepare; megatron: a .bin/.idx pair; numpy: a one-dimensional .npy of token ids."""
    separator: str = ""
    """Text between two documents of a text file, for example <|endoftext|>. Empty = each file is one document. A
    document may have up to 1 GiB."""
    text_field: str = "text"
    """Column of JSONL, JSON, CSV and Parquet files that holds the text."""
    content: Content = "text"
    """Content of a row of a JSONL, JSON, CSV or Parquet file: text, or a conversation. The chat template renders a
    conversation as text, and the loss counts only the assistant's tokens. messages: a list of role and content; pairs:
    prompt and completion, each a text or a list of messages; sharegpt: a list of from and value; alpaca: instruction,
    input and output; chat: detect the form from the fields of each file."""
    chat_template: str = ""
    """File with a chat template in Jinja. Empty = the template that comes with data.tokenizer."""
    date: str = ""
    """Current date for chat templates that write it, for example 2026-01-31. Empty = none."""
    long_documents: LongDocuments = "auto"
    """Treatment of documents longer than a row. split: documents continue in the next row, and each row treats its
    part as a separate document; cut: rows hold whole documents, and only the first part of a longer document is kept;
    drop: rows hold whole documents, and longer documents are dropped; auto: cut for conversations, split otherwise."""
    documents_per_row: int = setting(0, bounds=NON_NEGATIVE)
    """Maximum number of documents in a row; the rest of the row is padding. 0 = no limit, except that with
    training.attention=cudnn the start of the run sets one of 1 to 16, the smallest that adds hardly any padding."""
    tokenizer: str = setting("auto", resume="freely")
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
    stall_seconds: float = setting(600.0, resume="freely", bounds=POSITIVE)
    """Longest wait for one batch, in seconds. After that the run ends with an error."""

    @property
    def uses_bytes(self) -> bool:
        """Use of the byte tokenizer. `resolve_pretrained` replaces `auto` if there is a pretrained model."""
        return self.tokenizer in ("auto", "bytes")

    def problems(self) -> list[str]:
        found = find_out_of_range("data", self)
        if self.content == "text" and (self.chat_template or self.date):
            found.append("data.chat_template and data.date apply only to conversations: also set data.content=chat")
        if self.content != "text" and not self.paths:
            found.append(f"data.content={self.content}: there are no files to read; name them with data.paths")
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


def _is_date(day: str) -> bool:
    try:
        return date.fromisoformat(day).isoformat() == day
    except ValueError:
        return False
