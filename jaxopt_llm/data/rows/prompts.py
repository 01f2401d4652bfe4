"""Prompts that a model answers itself: what the data hold of them, and the room that their answers take in rows."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.config import Config
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.skipped import Skipped
from jaxopt_llm.data.reading.source import Document
from jaxopt_llm.data.rows.packing import BestFit, PackedRows
from jaxopt_llm.data.tokens.pieces import frame_ids
from jaxopt_llm.data.tokens.template import Renderer, find_template
from jaxopt_llm.data.tokens.tokenizer import Tokenizer

ARGUMENTS = ("prompts", "completions", "completion_ids")  # of a function that rewards answers, besides the columns
COMPLETION = "completion"  # column of the answers that rows have


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt.

    ids: its tokens, int32.
    row: the columns of its row, with the prompt itself as the row has it.
    answer: int32, tokens of the answer in its row, with the end of the turn; None if all answers are drawn.
    """

    ids: NDArray[np.int32]
    row: Mapping[str, Any]
    answer: NDArray[np.int32] | None = None

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.row["prompt"], str)


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts of a run that leave room for an answer in a row.

    dropped: number of the others.
    """

    training: Sequence[Prompt]
    held_out: Sequence[Prompt]
    dropped: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(prompt.ids.size for prompt in (*self.training, *self.held_out))

    def __str__(self) -> str:
        dropped = f"; {self.dropped:,} leave no room for an answer and are dropped" if self.dropped else ""
        return f"prompts: {len(self.training):,}, with at most {self.longest} tokens{dropped}"


def open_prompts(
    config: Config, training: Sequence[PackedRows], held_out: Sequence[PackedRows], tokenizer: Tokenizer
) -> Prompts:
    """Return the prompts of a run. With `rollouts.share` those to train on have the answers of their rows.

    Raises:
        InputError: there are none, or a column cannot be given to functions, or the answers of a step do not fit; or a
            row has no answer that can be read.
    """
    found = [_read_prompts(rows, config) if rows else ([], 0) for rows in (training, held_out)]
    (trained, dropped), (others, more) = found
    if config.rollouts.share < 1:
        read = AnswerReader(config, tokenizer)
        trained = [replace(prompt, answer=read(prompt)) for prompt in trained]
    prompts = Prompts(trained, others, dropped + more)
    check_room(prompts.longest, config)
    return prompts


class AnswerReader:
    """Reader of the answers in rows of prompts. Their tokens continue the tokens of the prompt."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer

    @functools.cached_property
    def _renderer(self) -> Renderer:
        return Renderer(find_template(self._config.data, self._tokenizer))

    def __call__(self, prompt: Prompt) -> NDArray[np.int32]:
        """Return the tokens of an answer. Raises InputError if there is none, or the template writes it elsewhere."""
        given, name = prompt.row.get(COMPLETION), repr(str(prompt.row["prompt"])[:60])
        if not given or (isinstance(given, list) and not prompt.is_chat):
            raise InputError(
                f"rollouts.share={self._config.rollouts.share}: the row of the prompt {name} has no answer in a column "
                f"{COMPLETION}: add it, name another column with --data.columns {COMPLETION}=COLUMN, or set "
                "--rollouts.share 1"
            )
        asked, answer, is_text = prompt.row["prompt"], given, not prompt.is_chat
        if prompt.is_chat:
            asked, answer = self._render(asked, given, name)
        prefix, suffix = (self._tokenizer.prefix, self._tokenizer.suffix) if is_text else ((), ())
        encoded = self._tokenizer.encode([(asked + answer).encode(), answer.encode()])
        whole, alone = (
            np.concatenate(frame_ids(ids, start, suffix), dtype=np.int32, casting="unsafe")
            for ids, start in zip(encoded, (prefix, ()), strict=True)
        )
        if np.array_equal(whole[: prompt.ids.size], prompt.ids):
            return whole[prompt.ids.size :]
        return alone  # a token would reach from the prompt into the answer

    def _render(self, messages: list[Any], given: Any, name: str) -> tuple[str, str]:
        """Return the texts of a prompt and of its answer, with the token that ends it, as the template writes them."""
        answer = given if isinstance(given, list) else [{"role": "assistant", "content": given}]
        content = json.dumps({"messages": [*messages, *answer]}).encode()
        document = Document(f"the prompt {name}", content, b"", ())
        asked, text, end = self._renderer.render_prompt(messages), "", 0
        for found in self._renderer.render(document, self._config.data, Skipped()):  # the last one is the whole one
            text, end = found.content.decode(), max(end for _, end in found.spans or ((0, 0),))
        if not text.startswith(asked) or end <= len(asked):
            raise InputError(
                f"rollouts.share={self._config.rollouts.share}: the chat template does not write the answer to {name} "
                "where it asks for one: name another template with --data.chat_template, or set --rollouts.share 1"
            )
        return asked, text[len(asked) : end]


def _read_prompts(rows: Sequence[PackedRows], config: Config) -> tuple[list[Prompt], int]:
    """Return the prompts that leave room for an answer in a row, and the number of the others."""
    name, streams = rows[0].name, [each.stream for each in rows]
    if any(piece.size and piece.rows is None for stream in streams for piece in stream.pieces):
        raise InputError(f"{name} holds no prompts but tokens: name JSONL, JSON, CSV, Parquet or Arrow files")
    pairs = [pair for stream in streams for pair in stream.read_prompts()]
    found = [Prompt(ids.astype(np.int32), json_files.parse(row)) for ids, row in pairs if ids.size]
    if taken := [column for column in ARGUMENTS if any(column in prompt.row for prompt in found)]:
        raise InputError(
            f"{name}: the column {taken[0]} has the name of an argument of the functions of rollouts.rewards: "
            f"rename it, or leave it unread with --data.columns {taken[0]}="
        )
    room = config.training.sequence_length + 1 - config.rollouts.max_new_tokens  # the last token is only a target
    kept = [prompt for prompt in found if prompt.ids.size <= room]
    if not kept:
        raise InputError(
            f"{name}: no prompt has at most {room} tokens, the rest of training.sequence_length="
            f"{config.training.sequence_length} after rollouts.max_new_tokens={config.rollouts.max_new_tokens}; "
            "increase the length"
        )
    return kept, len(pairs) - len(kept)


def check_room(longest: int, config: Config) -> None:
    """Raise InputError unless the rows of a batch hold the answers of a step, even if all are as long as they may be.

    longest: tokens of the longest prompt.
    """
    drawn, training = config.rollouts, config.training
    count, length = drawn.prompts * drawn.group_size, longest + drawn.max_new_tokens - 1
    lengths = np.full(count, length)
    needed = len(BestFit(np.arange(count) * length, lengths, training.sequence_length, config.data.documents_per_row))
    if needed > training.batch_size:
        raise InputError(
            f"training.batch_size={training.batch_size}: the {count} answers of a step (rollouts.prompts × "
            f"rollouts.group_size) with their prompts have up to {length} tokens each, and need {needed} rows of "
            f"training.sequence_length={training.sequence_length}: set --training.batch-size to at least {needed}"
        )
