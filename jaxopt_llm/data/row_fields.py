"""Rule for the fields of rows and messages: each is used, makes its row malformed, or is counted as not read.

Other trainers give some fields a meaning that this one does not have. A row that has such a field is malformed, because
training on the rest of the row would be another training. Any other field that nothing reads is counted by its name.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxopt_llm.config.data import fields_of_form
from jaxopt_llm.data.skipped import Malformed, Skipped

PREFERENCE_PAIR = "with a preference pair (chosen, rejected) instead of one conversation"
_JUDGED = "which judges answers or compares them"
_NO_TEXT = "which is no text"
_TOKENS = "which belongs to rows of tokens"
_MEDIA = dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _NO_TEXT)
# Fields that have a meaning elsewhere and cannot be used here, with the reason.
_UNUSABLE_IN_ROWS = {
    **_MEDIA,
    **dict.fromkeys(("rejected_response", "rejected_messages", "margin", "kto_tag"), _JUDGED),
    **dict.fromkeys(("score_chosen", "score_rejected"), _JUDGED),
    **dict.fromkeys(("input_ids", "assistant_masks", "completion_mask"), _TOKENS),
    **dict.fromkeys(("functions", "function_call", "available_tools"), "which tools replaces"),
    "system_prompt": "which is read with --data.columns system=system_prompt",
    "only_last": "which is replaced by weight 0 on the assistant's other messages",
    "weight": "which would weigh the row",
}
_UNUSABLE_IN_MESSAGES = {
    **_MEDIA,
    "function_call": "which tool_calls replaces",
    "refusal": "which is no content",
    **dict.fromkeys(("train_detail", "training_detail"), "which trains on parts of a message"),
}
_JUDGEMENTS_OF_PAIRS = {"label": _JUDGED}  # in other forms, a label may be anything
# Fields of a message that are 1 (or true) if it is learned and 0 (or false) if not: those of OpenAI, of LLaMA-Factory,
# of Axolotl and of ms-swift.
LEARNED_FLAGS = ("weight", "loss_weight", "train", "training", "loss")


def known_fields(form: str) -> Collection[str]:
    """Return the fields of a row that are used, or make it malformed."""
    return {*fields_of_form(form), "chosen", "rejected", *_unusable_in_rows(form)}


def check_row(row: Mapping[str, Any], form: str) -> None:
    """Raise Malformed if a row has a field that cannot be used. Empty values count as absent."""
    if row.keys() & {"chosen", "rejected"}:
        raise Malformed(PREFERENCE_PAIR)
    for name, reason in _unusable_in_rows(form).items():
        harmless = (name == "only_last" and row.get(name) is False) or (name == "weight" and row.get(name) == 1)
        if name in row and row[name] not in ("", [], {}) and not harmless:
            raise Malformed(f"with {name}, {reason}", f"--data.columns {name}= leaves it unread")


def _unusable_in_rows(form: str) -> dict[str, str]:
    return _UNUSABLE_IN_ROWS | (_JUDGEMENTS_OF_PAIRS if form == "pairs" else {})


def take_learned(message: dict[str, Any], is_assistant: bool) -> bool:
    """Remove the fields of a message that tell whether it is learned, and return whether it is.

    Raises:
        Malformed: a field cannot be used, or tells to learn a message that is not the assistant's.
    """
    for name in message.keys() & _UNUSABLE_IN_MESSAGES.keys():
        if message[name] not in ("", [], {}):
            raise Malformed(f"with a message with {name}, {_UNUSABLE_IN_MESSAGES[name]}")
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

    def count(self, names: Collection[str], owner: str = "") -> None:
        """Count fields of one row that only the template can read. owner: what has the fields, for messages."""
        for name in names:
            if name not in self._is_read:
                self._is_read[name] = re.search(rf"\b{re.escape(name)}\b", self._template) is not None
            if not self._is_read[name]:
                self.skipped.add_unread(f"{name} of {owner}" if owner else name)
