"""Family of Hugging Face models: the mapping between its tensors and config.json fields and ours.

For a config.json of an unknown family, the message names the families that are nearest to it.
"""

import contextlib
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxopt_llm.checkpoint.huggingface import codecs
from jaxopt_llm.checkpoint.huggingface.codecs import Codec, Settings, Unsupported, shorten
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.config.fields import get_field, replace_fields
from jaxopt_llm.config.unread import find_unread_by_model

BY_HEAD = " by head "  # separates leaves that lie next to each other within each head of a tensor's output


@dataclass(frozen=True, eq=False)
class Family:
    """Mapping between a family's folders and our models.

    Attributes:
        model_type: value of the config.json field that is written.
        architecture: name of the class in transformers.
        names: tensor name -> path of our leaf, inside a block or outside the stacks. In the name, the first {} stands
            for the layer number and the second {} for the expert number. Several paths, separated by blanks, lie next
            to each other along the output dimension; paths separated by `BY_HEAD` lie next to each other within
            each head.
        codecs: codecs for the fields of config.json.
        defaults: values of fields that config.json may omit.
        input_first: whether matrices in blocks are [in, out] instead of [out, in] as in torch.nn.Linear.
        base_prefix: name prefix that is missing in a file of the model without its head.
        ignored: glob patterns of tensor names that hold no parameters.
        mtp_prefix: name prefix, with {} for the layer number, of the multi-token prediction (MTP) layer after the last
            layer. Such a layer has a tensor eh_proj. It is ignored, as in transformers.
        second_names: further values of model_type whose models have the same tensors and fields.
        in_memory_names: names under which the classes of transformers 5 and later hold a layer's parameters, and write
            them on request -> the names in `names` of the tensors that these consist of. Several tensors are
            concatenated, and those of all experts are stacked.
    """

    model_type: str
    architecture: str
    names: dict[str, str]
    codecs: tuple[Codec, ...]
    defaults: Settings = field(default_factory=dict)
    input_first: bool = False
    base_prefix: str = "model."
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    mtp_prefix: str = ""
    second_names: tuple[str, ...] = ()
    in_memory_names: dict[str, str] = field(default_factory=dict)

    @property
    def model_types(self) -> tuple[str, ...]:
        return self.model_type, *self.second_names

    def read(self, settings: Settings) -> ModelConfig:
        """Convert the content of a config.json to a model configuration. Raise Unsupported if that is not possible."""
        settings = self.defaults | settings
        fields: dict[str, Any] = {}
        for codec in self.codecs:
            fields |= codec.read(settings)
        config = replace_fields(ModelConfig(), fields)
        if found := config.problems():
            raise Unsupported(f"{'; '.join(found)}; {codecs.CORRECT}")
        return config

    def write(self, config: ModelConfig) -> Settings:
        """Convert a model configuration to the content of a config.json."""
        settings: Settings = {"architectures": [self.architecture], "model_type": self.model_type}
        for codec in self.codecs:
            settings |= codec.write(config)
        return settings

    def find_differences(self, config: ModelConfig) -> list[str]:
        """Return the fields of a model that the family's config.json cannot express."""
        try:
            restored, expected = canonicalise(self.read(self.write(config))), canonicalise(config)
        except Unsupported as error:
            return [str(error)]
        return [
            f"model.{name}={get_field(expected, name)}"
            for name in codecs.FIELD_TYPES
            if get_field(expected, name) != get_field(restored, name)
        ]


def canonicalise(config: ModelConfig) -> ModelConfig:
    """Return the same model with defaults in the fields that it does not read, so that equal models compare equal."""
    has_experts = [config.moe.has_experts(layer) for layer in range(config.layers)]
    canonical: dict[str, Any] = {
        "pattern": codecs.find_shortest_period(codecs.list_layer_kinds(config)),
        "attention_scale": config.attention_scale or config.head_dim**-0.5,
    }
    if config.rope.scaling == "yarn":  # whichever fields it comes from
        canonical |= {"rope.attention_factor": config.rope.magnitude, "rope.mscale": ModelConfig().rope.mscale}
    if expert_layers := codecs.find_expert_layers(has_experts):
        canonical["moe.dense_layers"], canonical["moe.expert_every"] = expert_layers
    unread = {name: get_field(ModelConfig(), name) for name in find_unread_by_model(config)}
    return replace_fields(config, canonical | unread | TRAINING_ONLY)


# Defaults of the fields that no config.json has: they affect training only. It has the weight of the balance loss.
TRAINING_ONLY = {
    name: get_field(ModelConfig(), name)
    for name in codecs.FIELD_TYPES
    if name not in codecs.PRETRAINED_FIELDS and name != "moe.balance_loss"
}


# Fields without effect on the logits of a decoder, and fields that name code, files or people.
WITHOUT_EFFECT = {
    *("architecture", "architectures", "attn_implementation", "auto_map", "cache_implementation"),
    *("chunk_size_feed_forward", "default_theta", "dtype", "id2label", "initializer_range", "is_causal"),
    *("is_decoder", "is_encoder_decoder", "label2id", "max_position_embeddings", "model_type"),
    *("_name_or_path", "num_labels", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("pretraining_tp", "problem_type", "return_dict", "tie_encoder_decoder", "tokenizer_class"),
    *("torch_dtype", "transformers_version", "use_cache"),
}
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
