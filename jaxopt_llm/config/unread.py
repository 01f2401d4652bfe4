"""Settings that a configuration does not read, because another setting makes them irrelevant."""

from collections.abc import Iterator

from jaxopt_llm.config import fields
from jaxopt_llm.config.model import GATED_DELTA, READ_BY_SCALING, WINDOWED, ModelConfig
from jaxopt_llm.config.run import Config
from jaxopt_llm.config.training import CLASSIFY, GRPO, KTO

Rule = tuple[str, str, bool]  # names separated by blanks, the reason, and whether the rule applies
EVERY_FIELD = ".*"  # end of a name that stands for all fields of a section


def find_unread(config: Config) -> dict[str, str]:
    """Return the settings with another value than the default that this configuration does not read, and why.

    Settings whose check reports an error in this case are not among them, nor `schedule.decay_steps`, which the start
    of a run sets.
    """
    model = () if config.model.pretrained else _model_rules(config.model)
    rules = [(_add_section("model", names), reason, applies) for names, reason, applies in model] + _rules(config)
    defaults = Config()
    return {
        name: reason
        for name, reason in _expand(rules, fields.FIELDS).items()
        if fields.get_field(config, name) != fields.get_field(defaults, name)
    }


def find_without_effect(config: Config) -> dict[str, str]:
    """Return what `find_unread` does, with the settings whose check reports an error because they are not read."""
    return find_unread(config) | {f"lora.{name}": reason for name, reason in config.lora.find_unread().items()}


def find_unread_by_model(model: ModelConfig) -> set[str]:
    """Return the fields that a model does not read, by their names in its section."""
    return set(_expand(_model_rules(model), [name for name, *_ in fields.walk_fields(ModelConfig)]))


def describe_unread(config: Config) -> Iterator[str]:
    """Yield a line for each reason why settings are not read."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in find_unread(config).items():
        by_reason.setdefault(reason, []).append(f"{name}={fields.get_field(config, name)}")
    for reason, settings in by_reason.items():
        yield f"no effect: {', '.join(settings)}, because {reason}"


def describe_newly_unread(chosen: Config, requested: Config) -> Iterator[str]:
    """Yield a line for each reason that applies only since values were chosen in place of `auto`."""
    known = {*describe_unread(requested)}
    yield from (line for line in describe_unread(chosen) if line not in known)


def gathers_codes(config: Config) -> bool:
    """Return whether weights are gathered over one of the axes of `sharding.int8_gathers`."""
    mesh, sharding = config.mesh, config.sharding
    gathered = {"data"} if sharding.optimizer_over_data else set()
    gathered |= {"fsdp", "expert", "context"} if sharding.zero_stage else set()
    return any(axis in gathered and mesh.size(axis) > 1 for axis in sharding.int8_gathers)


def divides_gradients(config: Config) -> bool:
    """Return whether `mesh.fsdp` divides gradients, so that `sharding.fsdp_gradients` is read."""
    return config.mesh.size("fsdp") > 1 and config.sharding.zero_stage >= 2


def _model_rules(model: ModelConfig) -> list[Rule]:
    moe, rope, learned = model.moe, model.rope, model.positions == "learned"
    has_experts = [moe.has_experts(layer) for layer in range(model.layers)]
    scaling = sorted({name for names in READ_BY_SCALING.values() for name in names} - rope.read_by_growth)
    other_scaling = " ".join(f"rope.{name}" for name in scaling if name not in READ_BY_SCALING[rope.scaling])
    return [
        ("tied_head logit_scale logit_softcap", f"model.scores={model.scores}", model.scores > 0),
        ("max_positions", f"model.positions={model.positions}", not learned),
        ("rope.*", "model.positions=learned", learned),
        (f"rope.scaling {' '.join(f'rope.{name}' for name in scaling)}", "model.rope.factor=1", not rope.is_scaled),
        (other_scaling, f"model.rope.scaling={rope.scaling}", True),
        ("window", "no layer of model.pattern is sliding or chunked", not {*WINDOWED} & {*model.pattern}),
        ("rope.sliding_theta", "no layer of model.pattern is sliding", "sliding" not in model.pattern),
        (
            "global_head_dim global_kv_heads values_from_keys",
            "no layer of model.pattern is global",
            {*model.pattern} <= {*WINDOWED, GATED_DELTA},
        ),
        ("wide_mlp", "model.shared_key_layers=0", not model.shared_key_layers),
        ("rope.growth_layers rope.growth_length", "model.rope.query_growth=0", not rope.query_growth),
        (
            "rope.query_growth rope.growth_layers rope.growth_length",
            f"{'no' if rope.growth_layers == 'nope' else 'every'} layer of model.pattern is global_nope",
            all((kind == "global_nope") != (rope.growth_layers == "nope") for kind in model.pattern),
        ),
        ("mlp_width", "every layer has experts", all(has_experts)),
        ("mla.*", "model.mla.kv_rank=0", not model.mla.kv_rank),
        ("delta.*", "no layer of model.pattern is gated_delta", GATED_DELTA not in model.pattern),
        (
            "rope.size rope.interleaved rope.query_growth rope.growth_layers rope.growth_length",
            "latent attention (model.mla.kv_rank)",
            model.mla.kv_rank > 0,
        ),
        ("moe.*", "model.moe.experts=0", not any(has_experts)),
        ("moe.router_groups_per_token", "model.moe.router_groups=1", moe.router_groups == 1),
        ("moe.shared_expert_gate", "model.moe.shared_expert_width=0", not moe.shared_expert_width),
        ("moe.router_bias_rate", "model.moe.router_bias=False", not moe.router_bias),
    ]


def _rules(config: Config) -> list[Rule]:
    data, schedule, mesh, sharding = config.data, config.schedule, config.mesh, config.sharding
    optimizer, dense = config.optimizer.name, not config.model.moe.experts
    has_text_files = data.format in ("auto", "text")
    exchanges = sharding.expert_exchange in ("all_to_all", "auto")
    return [
        ("data.format data.separator data.text_field", "data.paths is empty", not data.paths),
        ("data.weights", "data.paths names one path", len(data.paths) == 1),
        ("data.separator", f"data.format={data.format} has no text files", not has_text_files),
        ("data.text_field", f"data.content={data.content}", data.content != "text"),
        ("data.columns", "data.content=text", data.content == "text"),
        ("data.held_out", "evaluation.paths names the validation sets", bool(config.evaluation.paths)),
        ("training.grouped_matmul sharding.expert_exchange sharding.expert_room", "the model has no experts", dense),
        ("sharding.expert_exchange sharding.expert_room", "mesh.expert=1", mesh.expert == 1),
        ("sharding.expert_room", f"sharding.expert_exchange={sharding.expert_exchange}", not exchanges),
        ("sharding.optimizer_over_data sharding.data_gradients", "mesh.data=1", mesh.data == 1),
        (
            "sharding.fsdp_gradients",
            f"no gradient is divided over fsdp (mesh.fsdp={mesh.fsdp}, sharding.zero_stage={sharding.zero_stage})",
            not divides_gradients(config),
        ),
        ("sharding.int8_gathers", _describe_int8_gathers(config), not gathers_codes(config)),
        ("sharding.context_exchange", "mesh.context=1", mesh.context == 1),
        ("sharding.sequence_parallel", "mesh.tensor=1", mesh.tensor == 1),
        ("pipeline.*", "mesh.pipeline=1", mesh.pipeline == 1),
        ("optimizer.beta1 optimizer.beta2", f"optimizer.name={optimizer}", optimizer in ("sgd", "adafactor")),
        ("optimizer.epsilon", f"optimizer.name={optimizer}", optimizer not in ("adamw", "muon")),
        ("optimizer.momentum", f"optimizer.name={optimizer}", optimizer not in ("sgd", "muon")),
        ("checkpoint.replicate_directory", "checkpoint.replicate_every=0", not config.checkpoint.replicate_every),
        (
            "optimizer.outer_learning_rate optimizer.outer_momentum",
            "training.local_steps=1",
            config.training.local_steps == 1,
        ),
        *_objective_rules(config),
        ("training.spike_factor", "training.on_spike=off", config.training.on_spike == "off"),
        ("optimizer.decay_groups", "optimizer.weight_decay=0", not config.optimizer.weight_decay),
        ("schedule.warmup_kind schedule.initial_share", "schedule.warmup_steps=0", not schedule.warmup_steps),
        ("schedule.final_share", "schedule.kind=constant", schedule.kind == "constant"),
        ("schedule.cooldown_steps", f"schedule.kind={schedule.kind}", schedule.kind != "wsd"),
        (
            "evaluation.patience evaluation.batches evaluation.paths evaluation.samples evaluation.sample_tokens "
            "evaluation.tasks evaluation.task_limit evaluation.task_folder "
            "data.held_out checkpoint.keep_best",
            "evaluation.every=0",
            not config.evaluation.every,
        ),
        ("evaluation.sample_tokens", "evaluation.samples=0", not config.evaluation.samples),
        ("evaluation.task_limit evaluation.task_folder", "evaluation.tasks=()", not config.evaluation.tasks),
        ("profile.steps", "profile.start_step=0", not config.profile.start_step),
    ]


def _objective_rules(config: Config) -> list[Rule]:
    objective, training = config.training.objective, config.training
    by_objective = [
        ("preference.*", not training.pairs),
        ("distillation.*", not training.distills),
        ("rollouts.*", not config.draws),
        ("grpo.*", objective != GRPO),
        ("preference.reference", not training.has_reference),
        ("preference.margin", objective not in ("simpo", "reward")),
        ("preference.center_weight", objective != "reward"),
        ("preference.beta preference.label_smoothing preference.nll_weight", objective == "reward"),
        ("preference.label_smoothing", objective in ("ipo", "hinge", KTO)),
        ("preference.nll_weight", objective == KTO),
        ("preference.desirable_weight preference.undesirable_weight", objective != KTO),
        ("data.label_names", objective != CLASSIFY),
    ]
    return [
        ("training.mtp_weight", "model.mtp_layers=0", not config.model.mtp_layers),
        *((names, f"training.objective={objective}", applies) for names, applies in by_objective),
        ("distillation.teacher_base", "distillation.teacher=''", not config.distillation.teacher),
        ("rollouts.reward_seconds", "rollouts.rewards=()", not config.rollouts.rewards),
        ("rollouts.server_seconds rollouts.server_tolerance", "rollouts.server=", not config.rollouts.server),
        ("preference.label_smoothing", "preference.function", bool(config.preference.function)),
        ("preference.margin", f"data.label_field={config.data.label_field}", bool(config.data.label_field)),
    ]


def _describe_int8_gathers(config: Config) -> str:
    axes = ", ".join(f"mesh.{axis}={config.mesh.size(axis)}" for axis in config.sharding.int8_gathers)
    over_data = f"sharding.optimizer_over_data={config.sharding.optimizer_over_data}"
    stage = f"sharding.zero_stage={config.sharding.zero_stage}"
    return f"no weight is gathered over these axes ({axes}, {stage}, {over_data})"


def _add_section(section: str, names: str) -> str:
    return " ".join(f"{section}.{name}" for name in names.split())


def _expand(rules: list[Rule], known: list[str]) -> dict[str, str]:
    """Return the reason of the first rule that applies to each field."""
    found: dict[str, str] = {}
    for names, reason, applies in rules:
        for name in names.split() if applies else ():
            prefix = name.removesuffix("*")
            matches = [field for field in known if field.startswith(prefix)] if name.endswith(EVERY_FIELD) else [name]
            assert set(matches) <= set(known) and matches, name
            for field in matches:
                found.setdefault(field, reason)
    return found
