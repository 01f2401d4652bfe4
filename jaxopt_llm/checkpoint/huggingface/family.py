"""Family of Hugging Face models: the mapping between its tensors and config.json fields and ours.

For a config.json of an unknown family, the message names the families that are nearest to it.
"""

import contextlib
import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxopt_llm.checkpoint.huggingface import codecs
from jaxopt_llm.checkpoint.huggingface.codecs import Codec, Settings, Unsupported, shorten
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.config.fields import get_field, replace_fields
from jaxopt_llm.config.unread import find_unread_by_model

ALL_EXPERTS = "all experts: "  # before the leaves of a tensor that holds all experts of a layer
MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")  # fields with the number of MTP layers
EITHER = " or "  # separates the leaves of one tensor in blocks of different kinds
BY_HEAD = " by head "  # separates leaves that lie next to each other within each head of a tensor's output
SCORE_TENSOR = "score.weight"
DEFAULT_LABELS = 2  # of transformers, for a config.json that does not count them
KEYS = ("attention/key", "attention/value", "key_norm/scale")  # leaves of layers with keys of their own
BY_OUTPUT = " by output "  # separates leaves whose outputs alternate


@dataclass(frozen=True, eq=False)
class Family:
    """Mapping between a family's folders and our models.

    Attributes:
        model_type: value of the config.json field that is written.
        architecture: name of the class in transformers.
        names: tensor name -> path of our leaf, inside a block or outside the stacks. In the name, the first {} stands
            for the layer number and the second {} for the expert number. A tensor whose paths follow `ALL_EXPERTS`
            holds all experts of a layer. Several paths, separated by blanks, lie next to each other along the output
            dimension; paths separated by `BY_HEAD` lie next to each other within each head; the outputs of paths
            separated by `BY_OUTPUT` alternate. Of paths separated by `EITHER`, a block has one.
        codecs: codecs for the fields of config.json.
        defaults: values of fields that config.json may omit.
        input_first: glob pattern of the names of matrices that are [in, out] instead of [out, in] as in
            torch.nn.Linear.
        rows: glob pattern of the names of vectors that are stored as matrices of one row.
        base_prefix: name prefix that is missing in a file of the model without its head.
        ignored: glob patterns of tensor names that hold no parameters.
        mtp_prefix: name prefix of the multi-token prediction (MTP) layers. Those that `ModelConfig.mtp_layers` does not
            count are not read, and a folder that is written from this one keeps them. With {} for the layer number,
            they are the layers after the last layer that have a tensor eh_proj.
        mtp_copies: tensors of an MTP layer that are copies -> the path of our leaf that they are copies of. Empty: the
            family's MTP layers are never read.
        second_names: further values of model_type whose models have the same tensors and fields.
        reads_layer_settings: whether a codec reads per_layer_config, the fields that differ between layers.
        in_memory_names: names under which the classes of transformers 5 and later hold a layer's parameters, and write
            them on request -> the names in `names` of the tensors that these consist of. Several tensors are
            concatenated, and those of all experts are stacked.
        classifier: name of the class with scores of documents; empty: transformers has none, or one of another form.
        models: names of the models, for the documentation.
        swaps_expert_factors: whether PEFT takes the inputs of the experts for outputs: it reads a stack of matrices as
            [experts, out, in] unless the class in transformers has `is_transposed`.
        forms: forms that the tensors have in other folders: the attributes that differ. Names and shapes tell the form.
        constants: names of tensors without dimensions that are no parameters -> the value that they must have.
    """

    model_type: str
    architecture: str
    names: dict[str, str]
    codecs: tuple[Codec, ...]
    defaults: Settings = field(default_factory=dict)
    input_first: str = ""
    rows: str = ""
    base_prefix: str = "model."
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    mtp_prefix: str = ""
    mtp_copies: dict[str, str] = field(default_factory=dict)
    second_names: tuple[str, ...] = ()
    reads_layer_settings: bool = False
    in_memory_names: dict[str, str] = field(default_factory=dict)
    swaps_expert_factors: bool = False
    forms: tuple[dict[str, Any], ...] = ()
    constants: dict[str, float] = field(default_factory=dict)
    classifier: str = ""
    models: str = field(kw_only=True)

    @property
    def model_types(self) -> tuple[str, ...]:
        return self.model_type, *self.second_names

    @property
    def tensor_names(self) -> dict[str, str]:
        """`names`, with the tensor of the scores."""
        return self.names | ({SCORE_TENSOR: "non_layer/score/table"} if self.classifier else {})

    def list_constants(self, layers: int) -> dict[str, float]:
        """Return the constants of a model with this number of layers by tensor name."""
        return {name.format(layer): value for layer in range(layers) for name, value in self.constants.items()}

    def list_shared(self, config: ModelConfig) -> set[str]:
        """Return the names of key and value tensors in layers without keys of their own.

        Published files have these tensors, which the class in transformers ignores.
        """
        names = [name for name, leaf in self.names.items() if leaf in KEYS]
        return {name.format(layer) for name in names for layer in range(config.layers_with_keys, config.layers)}

    def list_copies(self, config: ModelConfig) -> dict[str, str]:
        """Return the names of tensors that are copies, with the names of those that they are copies of."""
        tensors = {leaf: name for name, leaf in self.names.items()}
        if config.table_is_head:
            tensors["non_layer/head/table"] = tensors["non_layer/embedding/table"]
        return {
            copy.format(layer): tensors[leaf]
            for layer in range(config.layers, config.blocks)
            for copy, leaf in self.mtp_copies.items()
        }

    def find_mtp(self, names: Collection[str], settings: Settings) -> set[str]:
        """Return the names of tensors that belong to MTP layers. settings: the config.json."""
        layers, counts = settings.get("num_hidden_layers"), [settings.get(name) for name in MTP_COUNTS]
        if not self.mtp_prefix or type(layers) is not int:
            return set()
        if "{}" not in self.mtp_prefix:
            return {name for name in names if name.startswith(self.mtp_prefix)}
        count = max(1, *(each for each in counts if type(each) is int), 0)
        prefixes = [self.mtp_prefix.format(layer) for layer in range(layers, layers + count)]
        prefixes = [prefix for prefix in prefixes if f"{prefix}eh_proj.weight" in names]
        return {name for name in names if name.startswith(tuple(prefixes))}

    def read(self, settings: Settings) -> ModelConfig:
        """Convert the content of a config.json to a model configuration. Raise Unsupported if that is not possible."""
        settings = self.defaults | settings
        fields: dict[str, Any] = {}
        for codec in self.codecs:
            fields |= codec.read(settings)
        config = replace_fields(ModelConfig(), fields | {"scores": self._read_scores(settings)})
        if found := config.problems():
            raise Unsupported(f"{'; '.join(found)}; {codecs.CORRECT}")
        return config

    def write(self, config: ModelConfig) -> Settings:
        """Convert a model configuration to the content of a config.json."""
        architecture = self.classifier if config.scores else self.architecture
        settings: Settings = {"architectures": [architecture], "model_type": self.model_type}
        for codec in self.codecs:
            settings |= codec.write(config)
        if config.scores:
            settings |= describe_label_names(_name_by_number(config.scores))
            settings["problem_type"] = "regression" if config.scores == 1 else "single_label_classification"
        return settings

    def _read_scores(self, settings: Settings) -> int:
        """Return the number of scores of a config.json, as transformers counts the labels; 0 without scores."""
        if not self.classifier or settings.get("architectures") not in (self.classifier, [self.classifier]):
            return 0
        codecs.check_value(settings, "problem_type", "single_label_classification", "regression")
        names, count = settings.get("id2label"), settings.get("num_labels")
        if isinstance(names, dict):
            return len(names)
        return count if type(count) is int and count > 0 else DEFAULT_LABELS

    def find_differences(self, config: ModelConfig) -> list[str]:
        """Return the fields of a model that the family's config.json cannot express."""
        if config.mtp_layers and not self.mtp_copies:
            return [f"model.mtp_layers={config.mtp_layers}"]
        if config.scores and not self.classifier:
            return [f"model.scores={config.scores}"]
        try:
            return list_differences(config, self.read(self.write(config)))
        except Unsupported as error:
            return [str(error)]


def read_label_names(settings: Settings, scores: int) -> tuple[str, ...]:
    """Return the names of the classes of a config.json in the order of their numbers; empty if it has only numbers."""
    stored = settings.get("id2label")
    names = tuple(stored.get(str(index), "") for index in range(scores)) if isinstance(stored, dict) else ()
    is_named = all(names) and names != _name_by_number(scores) and len(names) == len(stored or ())
    return names if is_named else ()


def describe_label_names(names: Sequence[str]) -> Settings:
    """Return the fields of a config.json that name the classes, given in the order of their numbers."""
    numbers = {name: index for index, name in enumerate(names)}
    return {"id2label": {str(index): name for name, index in numbers.items()}, "label2id": numbers}


def _name_by_number(scores: int) -> tuple[str, ...]:
    """Return the names that transformers gives to classes without names."""
    return tuple(f"LABEL_{index}" for index in range(scores))


def list_differences(expected: ModelConfig, found: ModelConfig) -> list[str]:
    """Return the fields, with their expected values, in which two models differ."""
    expected, found = canonicalise(expected), canonicalise(found)
    return [
        f"model.{name}={get_field(expected, name)}"
        for name in codecs.FIELD_TYPES
        if get_field(expected, name) != get_field(found, name)
    ]


def canonicalise(config: ModelConfig) -> ModelConfig:
    """Return the same model with defaults in the fields that it does not read, so that equal models compare equal."""
    if config.rope.query_growth:  # wherever its length comes from
        config = replace_fields(
            config, {"rope.growth_length": config.rope.growth_length or config.rope.original_length}
        )
    has_experts = [config.moe.has_experts(layer) for layer in range(config.layers)]
    canonical: dict[str, Any] = {
        "pattern": codecs.find_shortest_period(codecs.list_layer_kinds(config)),
        "attention_scale": config.attention_scale or config.head_dim**-0.5,
        "global_head_dim": config.of_layers("global").head_dim,
        "global_kv_heads": config.of_layers("global").kv_heads,
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


def order_by_distance(settings: Settings, families: Sequence[Family]) -> "list[Comparison]":
    """Compare a config.json of an unknown family with families; the nearest comes first."""
    name = str(settings.get("model_type"))

    def similarity(each: Comparison) -> float:
        return difflib.SequenceMatcher(None, name, each.family.model_type).ratio()

    return sorted(
        (_compare(settings, family) for family in families), key=lambda each: (*each.distance, -similarity(each))
    )


def describe_nearest(settings: Settings, families: Sequence[Family]) -> str:
    """Return a clause that names the nearest families, and what a config.json of an unknown family has beyond them."""
    nested = [name for name, value in settings.items() if isinstance(value, dict) and "hidden_size" in value]
    if "hidden_size" not in settings and nested:
        return f"the sizes are in {nested[0]}, so the model would need parts beyond a decoder of text"
    first, *others = order_by_distance(settings, families)
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


class Comparison(NamedTuple):
    """A family and a config.json of another one.

    problem: why the family cannot read it; empty: it can. extra: its fields that the family does not have. missing:
    number of the family's fields that it does not have.
    """

    family: Family
    problem: str
    extra: list[str]
    missing: int

    @property
    def fits(self) -> bool:
        """The family has all fields of the config.json. Fields that the file lacks have defaults."""
        return not self.problem and not self.extra

    @property
    def distance(self) -> tuple[int, bool]:
        return len(self.extra) + self.missing, bool(self.problem)


def _compare(settings: Settings, family: Family) -> Comparison:
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
    return Comparison(family, problem, extra, len((known | {*family.defaults}) - settings.keys() - WITHOUT_EFFECT))


def _has_effect(name: str, value: Any) -> bool:
    if value in (None, False, 0, [], {}) or "dropout" in name:
        return False
    return not name.endswith(("_token_id", "_pdrop")) and not (
        isinstance(value, list) and all(each == "full_attention" for each in value)
    )
