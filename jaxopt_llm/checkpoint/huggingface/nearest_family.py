"""The families that are nearest to a config.json of an unknown family, and what it asks for beyond them."""

import contextlib
import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxopt_llm.checkpoint.huggingface.codecs import Settings, Unsupported, shorten
from jaxopt_llm.checkpoint.huggingface.family import Family
from jaxopt_llm.config import ModelConfig

# Fields without effect on the logits of a decoder, and fields that name code, files or people.
WITHOUT_EFFECT = frozenset(
    (
        *(
            "_name_or_path",
            "architectures",
            "auto_map",
            "chunk_size_feed_forward",
            "dtype",
            "id2label",
            "initializer_range",
        ),
        *("is_causal", "is_decoder", "is_encoder_decoder", "label2id", "max_position_embeddings", "model_type"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "pretraining_tp", "problem_type"),
        *("return_dict", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache", "attn_implementation"),
        *("architecture", "cache_implementation", "default_theta", "num_labels", "tie_encoder_decoder"),
    )
)
MAX_FAMILIES, MAX_FIELDS = 3, 6  # in a message


class _Recorded(dict[str, Any]):
    """Settings that record which fields are read."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


def describe_nearest(settings: Settings, families: Sequence[Family]) -> str:
    """Return a clause that names the nearest families, and what a config.json of an unknown family has beyond them."""
    nested = [name for name, value in settings.items() if isinstance(value, dict) and "hidden_size" in value]
    if "hidden_size" not in settings and nested:
        return f"the sizes are in {nested[0]}, so the model would need parts beyond a decoder of text"
    name = str(settings.get("model_type"))
    compared = [_compare(settings, family) for family in families]

    def similarity(each: _Comparison) -> float:
        return difflib.SequenceMatcher(None, name, each.family.model_type).ratio()

    first, *others = sorted(compared, key=lambda each: (*each.distance, -similarity(each)))
    names = [first.family.model_type, *(each.family.model_type for each in others if each.distance == first.distance)]
    nearest = f"the nearest is {' or '.join(names[:MAX_FAMILIES])}"
    differences = [first.problem] if first.problem else []
    if first.extra:
        shown = ", ".join(first.extra[:MAX_FIELDS])
        more = f" and {len(first.extra) - MAX_FIELDS} more" if len(first.extra) > MAX_FIELDS else ""
        differences.append(f"the model would need {shown}{more}, which {names[0]} does not have")
    if not differences:
        return f"{nearest}, which has the same fields, but perhaps other layers or tensors"
    return f"{nearest}, but {'; '.join(differences)}"


class _Comparison(NamedTuple):
    """A family and a config.json of another one.

    problem: why the family cannot read it; empty: it can. extra: its fields that the family does not have. missing:
    number of the family's fields that it does not have.
    """

    family: Family
    problem: str
    extra: list[str]
    missing: int

    @property
    def distance(self) -> tuple[int, bool]:
        return len(self.extra) + self.missing, bool(self.problem)


def _compare(settings: Settings, family: Family) -> _Comparison:
    recorded, problem = _Recorded(family.defaults | settings), ""
    known: set[str] = set()
    for codec in family.codecs:
        try:
            codec.read(recorded)
        except Unsupported as error:
            problem = problem or str(error).split(";")[0]
        with contextlib.suppress(Unsupported):  # another model than the default one has these fields
            known |= codec.write(ModelConfig()).keys()
    ignored = recorded.names | known | WITHOUT_EFFECT
    extra = [
        f"{name}={shorten(value)}"
        for name, value in settings.items()
        if name not in ignored and _has_effect(name, value)
    ]
    return _Comparison(family, problem, extra, len((known | {*family.defaults}) - settings.keys() - WITHOUT_EFFECT))


def _has_effect(name: str, value: Any) -> bool:
    if value in (None, False, 0, [], {}) or "dropout" in name:
        return False
    return not name.endswith(("_token_id", "_pdrop")) and not (
        isinstance(value, list) and all(each == "full_attention" for each in value)
    )
