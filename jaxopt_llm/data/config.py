"""What is read: the settings."""

from dataclasses import dataclass
from datetime import date
from typing import Literal

Format = Literal["auto", "text", "jsonl", "parquet", "prepared", "megatron", "numpy"]
Content = Literal["text", "chat", "messages", "pairs", "sharegpt"]
LongDocuments = Literal["auto", "split", "cut", "drop"]


@dataclass(frozen=True)
class DataConfig:
    """What is read, and with which tokenizer."""

    paths: tuple[str, ...] = ()
    """files, folders or globs, each a source; none: the source of Python's standard library"""
    weights: tuple[float, ...] = ()
    """share of the rows that each of data.paths gives, relative to their sum; none: every token once an epoch"""
    format: Format = "auto"
    """of the files: auto goes by suffix; prepared is what jaxopt_llm.prepare writes, megatron a .bin/.idx pair, numpy
    a one-dimensional .npy of token ids"""
    separator: str = ""
    """what stands between the documents of a text file, as in <|endoftext|>; empty: the file is one document, of which
    none may exceed 1 GiB"""
    text_field: str = "text"
    """column of JSONL and Parquet files that holds the text"""
    content: Content = "text"
    """what a row of JSONL and Parquet files holds: text, or a conversation, made text by the chat template and learnt
    where the assistant speaks. messages: a list of role and content; pairs: prompt and completion; sharegpt: a list of
    from and value; chat: whichever of them each file's fields say"""
    chat_template: str = ""
    """a file with a chat template in Jinja; empty: the one that comes with data.tokenizer"""
    date: str = ""
    """what a chat template that writes today's date is told, as in 2026-01-31"""
    long_documents: LongDocuments = "auto"
    """split: documents run on from row to row, each row a document of its own; cut: rows hold whole documents, and of
    one longer than a row its beginning; drop: rows hold whole documents, and the longer are left out; auto: cut where
    there are conversations, else split"""
    tokenizer: str = "bytes"
    """bytes (256 and two delimiters), or the path of a Hugging Face tokenizer.json"""
    beginning: str = ""
    """token put before each document; empty: the tokenizer's own, if it has one"""
    end: str = ""
    """token put after each document; empty: the tokenizer's own"""
    malformed: Literal["error", "skip", "replace"] = "error"
    """documents that are not UTF-8 or cut short: end the command, skip and count them, or replace what is not UTF-8
    by U+FFFD (and skip what is not even JSON)"""
    held_out: float = 0.05
    """share of the documents kept out of training for evaluation, above 0 and below 1"""
    stall_seconds: float = 600.0
    """longest wait for one batch, in seconds, before the run ends with a message"""

    def problems(self) -> list[str]:
        found = []
        if not 0 < self.held_out < 1:
            found.append(f"data.held_out={self.held_out}: must lie above 0 and below 1")
        if self.content == "text" and (self.chat_template or self.date):
            found.append("data.chat_template and data.date are for conversations: say which with data.content chat")
        if self.content != "text" and not self.paths:
            found.append(f"data.content={self.content}: name files with data.paths")
        if self.date and not _is_date(self.date):
            found.append(f"data.date={self.date}: no day as in 2026-01-31")
        if self.stall_seconds <= 0:
            found.append(f"data.stall_seconds={self.stall_seconds}: must be above 0")
        if self.weights and len(self.weights) != len(self.paths):
            found.append(f"data.weights has {len(self.weights)} values for {len(self.paths)} data.paths: give one each")
        twice = {path for path in self.paths if self.paths.count(path) > 1}
        if twice:
            found.append(f"data.paths has {', '.join(sorted(twice))} twice: give it one larger data.weights")
        if any(weight < 0 for weight in self.weights):
            found.append(f"data.weights={self.weights}: none may be negative")
        elif self.weights and not any(self.weights):
            found.append("data.weights are all zero: nothing would be read")
        return found


def _is_date(day: str) -> bool:
    try:
        return date.fromisoformat(day).isoformat() == day
    except ValueError:
        return False
