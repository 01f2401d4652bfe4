"""Family of Hugging Face models: the mapping between its tensors and config.json fields and ours."""

from dataclasses import dataclass, field
from typing import Any

from jaxopt_llm.checkpoint.huggingface.codecs import (
    CORRECT,
    FIELD_TYPES,
    PRETRAINED_FIELDS,
    Codec,
    Settings,
    Unsupported,
)
from jaxopt_llm.checkpoint.huggingface.codecs_moe import find_expert_layers
from jaxopt_llm.checkpoint.huggingface.codecs_windows import find_shortest_period
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.config.fields import get_field, replace_fields
from jaxopt_llm.config.unread import find_unread_by_model


@dataclass(frozen=True, eq=False)
class Family:
    """Mapping between a family's folders and our models.

    Attributes:
        model_type: value of the config.json field.
        architecture: name of the class in transformers.
        names: tensor name -> path of our leaf, inside a block or outside the stacks. In the name, the first {} stands
            for the layer number and the second {} for the expert number. Several paths, separated by blanks, lie next
            to each other along the output dimension; paths separated by `names.BY_HEAD` lie next to each other within
            each head.
        codecs: codecs for the fields of config.json.
        defaults: values of fields that config.json may omit.
        input_first: whether matrices in blocks are [in, out] instead of [out, in] as in torch.nn.Linear.
        base_prefix: name prefix that is missing in a file of the model without its head.
        ignored: glob patterns of tensor names that hold no parameters.
        mtp_prefix: name prefix, with {} for the layer number, of the multi-token prediction (MTP) layer after the last
            layer. Such a layer has a tensor eh_proj. It is ignored, as in transformers.
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
    in_memory_names: dict[str, str] = field(default_factory=dict)

    def read(self, settings: Settings) -> ModelConfig:
        """Convert the content of a config.json to a model configuration. Raise Unsupported if that is not possible."""
        settings = self.defaults | settings
        fields: dict[str, Any] = {}
        for codec in self.codecs:
            fields |= codec.read(settings)
        config = replace_fields(ModelConfig(), fields)
        if found := config.problems():
            raise Unsupported(f"{'; '.join(found)}; {CORRECT}")
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
            for name in FIELD_TYPES
            if get_field(expected, name) != get_field(restored, name)
        ]


def canonicalise(config: ModelConfig) -> ModelConfig:
    """Return the same model with defaults in the fields that it does not read, so that equal models compare equal."""
    has_experts = [config.moe.has_experts(layer) for layer in range(config.layers)]
    canonical: dict[str, Any] = {
        "pattern": find_shortest_period([config.pattern[i % len(config.pattern)] for i in range(config.layers)]),
        "attention_scale": config.attention_scale or config.head_dim**-0.5,
    }
    if config.rope.scaling == "yarn":  # whichever fields it comes from
        canonical |= {"rope.attention_factor": config.rope.magnitude, "rope.mscale": ModelConfig().rope.mscale}
    if expert_layers := find_expert_layers(has_experts):
        canonical["moe.dense_layers"], canonical["moe.expert_every"] = expert_layers
    unread = {name: get_field(ModelConfig(), name) for name in find_unread_by_model(config)}
    return replace_fields(config, canonical | unread | TRAINING_ONLY)


# Defaults of the fields that no config.json has: they affect training only. It has the weight of the balance loss.
TRAINING_ONLY = {
    name: get_field(ModelConfig(), name)
    for name in FIELD_TYPES
    if name not in PRETRAINED_FIELDS and name != "moe.balance_loss"
}
