"""The families that are nearest to a config.json of an unknown family, and what it asks for beyond them."""

import difflib
from collections.abc import Sequence
from typing import Any

from jaxopt_llm.checkpoint.huggingface.codecs import Settings, Unsupported
from jaxopt_llm.checkpoint.huggingface.family import Family

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
MAX_NAMED = 6  # fields in a message


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
    """Return a clause that names the nearest families, and the fields of a config.json that they do not have."""
    nested = [name for name, value in settings.items() if isinstance(value, dict) and "hidden_size" in value]
    if "hidden_size" not in settings and nested:
        return f"the sizes are in {nested[0]}, so the model would need parts beyond a decoder of text"
    name = str(settings.get("model_type"))
    compared = [(family, *_compare(settings, family)) for family in families]

    def distance(each: tuple[Family, str, list[str]]) -> tuple[bool, int, float]:
        family, problem, extra = each
        return bool(problem), len(extra), -difflib.SequenceMatcher(None, name, family.model_type).ratio()

    (family, problem, extra), *rest = sorted(compared, key=distance)
    also = [each.model_type for each, other, more in rest if (bool(other), len(more)) == (bool(problem), len(extra))]
    nearest = f"the nearest is {family.model_type}" + (f" (or {', '.join(also[:2])})" if also else "")
    shown = ", ".join(extra[:MAX_NAMED]) + (f" and {len(extra) - MAX_NAMED} more" if len(extra) > MAX_NAMED else "")
    beyond = f"the model would need {shown}, which {family.model_type} does not have" if extra else ""
    if problem:
        return f"{nearest}, but {problem}" + (f"; {beyond}" if beyond else "")
    return f"{nearest}, whose fields it has; " + (beyond or "its layers or its tensors may differ all the same")


def _compare(settings: Settings, family: Family) -> tuple[str, list[str]]:
    """Return why a family cannot read a config.json (empty: it can), and the fields that it does not have."""
    recorded, problem = _Recorded(family.defaults | settings), ""
    for codec in family.codecs:
        try:
            codec.read(recorded)
        except Unsupported as error:
            problem = problem or str(error).split(";")[0]
    extra = [
        f"{name}={_shorten(value)}"
        for name, value in settings.items()
        if name not in recorded.names | WITHOUT_EFFECT
        and value not in (None, False, 0, 0.0, [], {})
        and not name.endswith(("_token_id", "dropout", "_pdrop"))
    ]
    return problem, extra


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."
