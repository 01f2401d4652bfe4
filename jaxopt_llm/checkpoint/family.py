"""A family of Hugging Face's folders: what says which tensors and fields of config.json are which of a model's."""

from dataclasses import dataclass, field, replace
from typing import Any

from jaxopt_llm.checkpoint.codecs import HINTS, Codec, Settings, Unsupported, period, sparse_layers
from jaxopt_llm.model.config import ModelConfig


@dataclass(frozen=True, eq=False)
class Family:
    """names: a tensor's name, {} for the number of its layer and a second one for that of its expert, -> our leaf: the
    path in a block, or of what is outside the stacks. Several, apart by blanks, lie side by side along the output's
    dimension, or, apart by names.BY_HEAD, along that of each head.
    defaults: fields that its config.json may lack, where that stands for something.
    input_first: whether matrices of the blocks are [in, out], not [out, in] as torch.nn.Linear's.
    base: what a file of the model without its head lacks at the start of its names.
    ignored: names of tensors that hold no parameters, as patterns.
    predicts_more: how names begin in a layer after the last, {} for its number, that predicts a token more, as its
        tensor eh_proj tells: it is left out, as transformers does.
    in_memory: other names, by which transformers' classes hold a layer's parameters since version 5, and write them on
    request -> the tensors of `names` that they are, side by side, and of all experts one after the other.
    """

    model_type: str
    architecture: str
    names: dict[str, str]
    codecs: tuple[Codec, ...]
    defaults: Settings = field(default_factory=dict)
    input_first: bool = False
    base: str = "model."
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    predicts_more: str = ""
    in_memory: dict[str, str] = field(default_factory=dict)

    def read(self, settings: Settings) -> ModelConfig:
        whole = self.defaults | settings
        fields: dict[str, Any] = {}
        for codec in self.codecs:
            fields |= codec.read(whole)
        config = ModelConfig(**fields)
        found = config.problems()
        if found:
            raise Unsupported("; ".join(found))
        return config

    def write(self, config: ModelConfig) -> Settings:
        settings: Settings = {"architectures": [self.architecture], "model_type": self.model_type}
        for codec in self.codecs:
            settings |= codec.write(config)
        return settings

    def differences(self, config: ModelConfig) -> list[str]:
        """What its config.json cannot say of a model."""
        try:
            said, wanted = canonical(self.read(self.write(config))), canonical(config)
        except Unsupported as error:
            return [str(error)]
        return [
            f"model.{name}={getattr(wanted, name)}" for name in HINTS if getattr(wanted, name) != getattr(said, name)
        ]


def canonical(config: ModelConfig) -> ModelConfig:
    """The same model, with defaults in the fields that it does not read."""
    # The last three are of training alone, and nowhere there: none drops a choice.
    unread = ["pretrained", "last_layers", "router_z_loss", "router_bias_rate", "expert_capacity"]
    changed: dict[str, Any] = {}
    has_experts = [config.has_experts(layer) for layer in range(config.layers)]
    if sparse := sparse_layers(has_experts):
        changed = dict(zip(("dense_layers", "expert_every"), sparse, strict=True))
        unread += ["mlp_width"] if all(has_experts) else []
    else:
        unread += OF_EXPERTS
    if "sliding" not in config.pattern:
        unread.append("window")
    if config.positions == "learned":
        unread += ["rope_theta"]
    else:
        unread += ["max_positions"]
    if config.positions == "learned" or config.rope_factor == 1:
        unread += OF_SCALING
    elif config.rope_scaling == "llama3":
        unread += OF_YARN
    unread += [] if config.latent_rank else OF_LATENTS
    return replace(
        config,
        **{name: getattr(ModelConfig, name) for name in unread},
        **changed,
        pattern=period([config.pattern[i % len(config.pattern)] for i in range(config.layers)]),
        attention_scale=config.attention_scale or config.head_dim**-0.5,
    )


# Fields that a model without experts does not read.
OF_EXPERTS = (
    *("experts", "experts_per_token", "expert_width", "shared_expert_width", "dense_layers", "expert_every"),
    *("router", "router_renormalises", "router_scale", "router_groups", "router_groups_per_token", "router_bias"),
    "balance_loss",
)
OF_LATENTS = ("query_rank", "rotary_head_dim", "value_head_dim")
OF_YARN = ("rope_mscale", "rope_mscale_all_dim")
OF_SCALING = (
    *("rope_scaling", "rope_low_frequency_factor", "rope_high_frequency_factor", "rope_original_length"),
    *OF_YARN,
)
