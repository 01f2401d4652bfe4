"""Rule for the fields of rows and messages: each is used, makes its row malformed, or is counted as not read.

Other trainers give some fields a meaning that this one does not have. A row that has such a field is malformed, because
training on the rest of the row would be another training. Any other field that nothing reads is counted by its name.
"""

import functools
import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxopt_llm.config.data import fields_of_form
from jaxopt_llm.data.reading.skipped import Malformed, Skipped

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
