"""Keys of a DeepSpeed configuration, and what each of them is here.

The names and the defaults are those of DeepSpeed 0.19 (docs/_pages/config-json.md and the pydantic models of its
source). `deepspeed.py` reads a file by these tables, and docs/guides/deepspeed.md shows them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Maps:
    """A key with an equivalent.

    Attributes:
        settings: our settings. A list has one entry for each of them; any other value applies to all of them.
        note: difference in meaning.
        values: our value for each value of DeepSpeed's. None: they are equal.
        otherwise: what to do with another value than those of `values`.
        default: DeepSpeed's default, which replaces ours if the key is absent. None: ours stays.
        default_note: note on the default.
        joint: a method of `Reader` in deepspeed.py reads the key together with others.
    """

    settings: tuple[str, ...]
    note: str = ""
    values: Mapping[Any, Any] | None = None
    otherwise: str = ""
    default: Any = None
    default_note: str = ""
    joint: bool = False


@dataclass(frozen=True)
class Ignored:
    """A key without a meaning here. reason: what takes its place."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """A key without an equivalent.

    Attributes:
        remedy: what to do instead.
        harmless: values that change nothing, in addition to null, {} and {"enabled": false}.
    """

    remedy: str
    harmless: tuple[Any, ...] = (False,)


Entry = Maps | Ignored | Refused
Keys = dict[str, Entry]  # by dotted name; a name stands for all keys below it


def _all(entry: Entry, prefix: str, names: str) -> Keys:
    """Return the same entry for several names, which blanks separate."""
    return {prefix + name: entry for name in names.split()}


def _joint(*settings: str, note: str = "", default: Any = None) -> Maps:
    return Maps(settings, note, default=default, default_note=note, joint=True)


# What Hugging Face's Trainer puts in the place of "auto" by the defaults of its TrainingArguments (transformers 5.23).
# Batch sizes, rates and precisions of the file itself come first: the Trainer refuses arguments that differ from them.
TRAINER: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 0,
    "fp16.enabled": False,
    "bf16.enabled": False,
}


DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
DEVICES = {"none": False, "cpu": True}
NO_NVME = 'there is no offload to NVMe; set "cpu"'
GATHERS = Ignored("weights are gathered where the computation reads them")
SCHEDULED = Ignored("the compiler groups and schedules communication")
ONLY_NVME = Ignored("only for NVMe")
TRANSFERS = Ignored("transfers use pinned memory, one layer at a time")
CHECKPOINTS = Ignored("a checkpoint holds float32 masters and is restored on any mesh")
RECOMPUTES = Ignored("remat.policy and remat.every choose what the decoder recomputes")
CONSTANT = "the nearest is an optax schedule: pass initialize(optimizer=...) and remove it"

BATCH: Keys = {
    "train_batch_size": _joint("training.batch_size", note="rows of the batch that step() gets"),
    "train_micro_batch_size_per_gpu": _joint("training.batch_size", note="× accumulation × data-parallel devices"),
    "gradient_accumulation_steps": _joint("training.accumulation"),
    "managed_gradient_accumulation": Refused("step() takes the whole batch and updates once", harmless=(True,)),
    "dataloader_drop_last": Ignored("the caller makes the batches"),
}

PARALLELISM: Keys = {
    "tensor_parallel.autotp_size": _joint("mesh.tensor", note="initialize(rules=...) names what is divided"),
    "tensor_parallel.partition_config": Refused("initialize(rules=...) names the dimensions that mesh.tensor divides"),
    **_all(SCHEDULED, "tensor_parallel.", "tp_overlap_comm keep_module_on_host replace_with_kernel_inject"),
    **_all(Ignored("the model is written here"), "tensor_parallel.", "preset_model dtype injection_policy_tuple"),
    "tensor_parallel.tp": Refused("set tensor_parallel.autotp_size"),
    "sequence_parallel_size": _joint("mesh.context", note="of the decoder"),
    "data_parallel_size": _joint("mesh.fsdp"),
    "seq_parallel_communication_data_type": SCHEDULED,
    "pipeline.stages": _joint("mesh.pipeline", note="of the decoder"),
    "pipeline.partition": Ignored("pipeline.split divides the layers"),
    **_all(RECOMPUTES, "pipeline.", "activation_checkpoint_interval use_reentrant"),
    **_all(SCHEDULED, "pipeline.", "pipe_partitioned grad_partitioned"),
    "pipeline.seed_layers": Ignored("run.seed"),
    "expert_parallel": Refused("set mesh.expert for the decoder's experts, and remove it"),
    "use_data_before_expert_parallelism": SCHEDULED,
    "mp_size": Refused("it is no key of DeepSpeed; set tensor_parallel.autotp_size", harmless=(1,)),
    "dp_size": Refused("it is no key of DeepSpeed; the devices that no other axis takes are data-parallel"),
    "pp_size": Refused("it is no key of DeepSpeed; set pipeline.stages", harmless=(1,)),
}

ZERO: Keys = {
    "stage": Maps(("sharding.zero_stage",), default=0),
    "offload_optimizer.device": Maps(
        ("offload.optimizer",), "the update itself runs on the GPU, one layer at a time", DEVICES, NO_NVME
    ),
    **_all(TRANSFERS, "offload_optimizer.", "pin_memory fast_init super_offload cpuadam_cores_perc"),
    **_all(ONLY_NVME, "offload_optimizer.", "nvme_path buffer_count buffer_size pipeline_read pipeline_write pipeline"),
    "offload_optimizer.ratio": Refused("all moments are offloaded, or none; set 1", harmless=(1,)),
    "offload_param.device": Maps(("offload.parameters",), "of the layers in a loop", DEVICES, NO_NVME),
    "offload_param.pin_memory": TRANSFERS,
    **_all(ONLY_NVME, "offload_param.", "nvme_path buffer_count buffer_size max_in_cpu"),
    "cpu_offload": Maps(("offload.optimizer",)),
    "cpu_offload_param": Maps(("offload.parameters",)),
    "cpu_offload_use_pin_memory": TRANSFERS,
    **_all(SCHEDULED, "", "contiguous_gradients overlap_comm reduce_scatter reduce_bucket_size allgather_partitions"),
    **_all(SCHEDULED, "", "allgather_bucket_size use_multi_rank_bucket_allreduce round_robin_gradients grad_hooks"),
    "sub_group_size": Ignored("the update runs layer by layer"),
    **_all(GATHERS, "stage3_", "max_live_parameters max_reuse_distance prefetch_bucket_size"),
    **_all(GATHERS, "stage3_", "param_persistence_threshold model_persistence_threshold allgather_sequential"),
    **_all(GATHERS, "stage3_", "module_granularity_threshold use_all_reduce_for_fetch_params"),
    **_all(GATHERS, "", "max_live_parameters max_reuse_distance prefetch_bucket_size param_persistence_threshold"),
    **_all(GATHERS, "", "model_persistence_threshold module_granularity_threshold use_all_reduce_for_fetch_params"),
    **_all(GATHERS, "", "allgather_sequential memory_efficient_linear override_module_apply leaf_module"),
    **_all(GATHERS, "", "log_trace_cache_warnings enable_sanity_checks legacy_stage1"),
    **_all(Ignored("Engine.model() gathers the weights"), "", "stage3_gather_16bit_weights_on_model_save"),
    **_all(Ignored("Engine.model() gathers the weights"), "", "stage3_gather_fp16_weights_on_model_save"),
    **_all(Ignored("Engine.model() gathers the weights"), "", "gather_16bit_weights_on_model_save"),
    **_all(CHECKPOINTS, "", "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint"),
    "ignore_unused_parameters": Ignored("a parameter that the loss does not read has a gradient of 0"),
    "save_muon_momentum_buffer_in_memory": ONLY_NVME,
    "zero_hpz_partition_size": _joint(
        "mesh.fsdp", "mesh.data", "sharding.optimizer_over_data", note="weights are gathered once a step over data"
    ),
    "mics_shard_size": _joint("mesh.fsdp", "mesh.data", note="the state is divided within this number of devices"),
    "mics_hierarchical_params_gather": SCHEDULED,
    "zero_quantized_weights": _joint("sharding.int8_gathers", note="blocks of at most 128 values"),
    "zero_quantized_gradients": _joint(
        "sharding.fsdp_gradients", "sharding.data_gradients", note="DeepSpeed's codes have 4 bits, too"
    ),
    "zero_quantized_nontrainable_weights": Refused("lora.base=int8 or nf4 in a Config quantises frozen matrices"),
    "zeropp_loco_param": Refused("no error of the codes is carried over to the next step; remove it"),
    "zenflow": Refused("the update waits for all gradients; remove it"),
}

PRECISION: Keys = {
    "fp16.enabled": _joint(
        "precision.compute_dtype",
        note="each overflow halves the scale; DeepSpeed's hysteresis is 2",
    ),
    "bf16.enabled": _joint("precision.compute_dtype", note="neither fp16 nor bf16: float32"),
    **_all(Ignored("steps that are not finite are always skipped"), "bf16.", "check_grad_overflow check_overflow"),
    "bf16.immediate_grad_update": SCHEDULED,
    "bf16.bf16_master_weights_and_grads": Refused("masters are float32; remove it"),
    "bf16.bf16_optimizer_states": Refused("set optimizer.state_dtype=bfloat16 in a Config"),
    "communication_data_type": Maps(
        ("precision.reduce_dtype",),
        values=DTYPES,
        otherwise="set fp32, bf16 or fp16",
        default="float32",
        default_note="DeepSpeed takes the dtype of the model",
    ),
    "data_types.grad_accum_dtype": Ignored("sums over microbatches are float32"),
    "data_types.param_dtype": Ignored("fp16 and bf16 decide"),
    "data_types.buffer_dtype": Refused("a variable keeps the dtype that the model gives it"),
    "amp": Refused("set bf16.enabled"),
    "torch_autocast": Refused("set bf16.enabled"),
}
FP16: Keys = {  # with fp16.enabled
    "fp16.initial_scale_power": _joint("precision.initial_loss_scale", note="2 to this power"),
    "fp16.loss_scale_window": Maps(("precision.loss_scale_growth_interval",), default=1000),
    "fp16.min_loss_scale": Refused("a scale below 1 ends the run; set 1", harmless=(1,)),
    "fp16.loss_scale": Refused("the scale is dynamic; set 0, or use bf16", harmless=(0,)),
    **_all(Ignored("each overflow halves the scale (hysteresis 1)"), "fp16.", "hysteresis consecutive_hysteresis"),
    "fp16.auto_cast": Refused("cast the inputs in the loss"),
    "fp16.fp16_master_weights_and_grads": Refused("masters are float32; remove it"),
}

GRADIENTS: Keys = {
    "gradient_clipping": Maps(
        ("optimizer.clip_norm",), default=1.0, default_note="DeepSpeed before 0.19.3 does not clip: write 0 for that"
    ),
    **_all(Ignored("gradients are averaged in precision.reduce_dtype"), "", "prescale_gradients"),
    "gradient_predivide_factor": Ignored("gradients are averaged in precision.reduce_dtype"),
    "gradient_allreduce_op": Refused(
        "gradients are averaged; multiply the loss by the number of devices", harmless=("mean",)
    ),
    "sparse_gradients": Ignored("gradients of tables are dense"),
    "disable_allgather": SCHEDULED,
    "optimizer.type": _joint("optimizer.name"),
    "optimizer.legacy_fusion": SCHEDULED,
    **_all(Ignored("any optimizer works with any stage"), "zero_", "allow_untested_optimizer force_ds_cpu_optimizer"),
    "scheduler.type": _joint("schedule.kind", note="without a scheduler: constant, no warm-up"),
}

DECAY = "biases and norm scales are not decayed (optimizer.decay_groups)"
_RATE = Maps(("optimizer.learning_rate",), default=1e-3)
_FUSED = Ignored("the compiler fuses the update")
ADAM: Keys = {
    "lr": _RATE,
    "betas": Maps(("optimizer.beta1", "optimizer.beta2"), default=(0.9, 0.999)),
    "eps": Maps(("optimizer.epsilon",), default=1e-8),
    "weight_decay": Maps(("optimizer.weight_decay",), DECAY, default=0.0),
    "adam_w_mode": _joint("optimizer.weight_decay", note="false only without weight decay, which is decoupled here"),
    "torch_adam": _joint("optimizer.weight_decay", note="PyTorch's default is 0.01: give weight_decay"),
    **_all(_FUSED, "", "fused foreach set_grad_none fp32_optimizer_states"),
    "bias_correction": Refused("moments are corrected; remove it", harmless=(True,)),
    "amsgrad": Refused("pass initialize(optimizer=optax.amsgrad(...))"),
    "max_grad_norm": Refused("set gradient_clipping", harmless=(0,)),
}
OPTIMIZERS: dict[str, Keys] = {  # parameters of each type, in lower case
    "adam": ADAM,
    "adamw": ADAM,
    "sgd": {
        "lr": _RATE,
        "momentum": Maps(("optimizer.momentum",), default=0.0),
        "weight_decay": Maps(("optimizer.weight_decay",), DECAY, default=0.0),
        **_all(_FUSED, "", "fused foreach"),
        "dampening": Refused("set 0", harmless=(0,)),
        **_all(Refused("pass an optax transformation: initialize(optimizer=...)"), "", "nesterov maximize"),
    },
    "lion": {
        "lr": _RATE,
        "betas": Maps(("optimizer.beta1", "optimizer.beta2"), default=(0.9, 0.999)),
        "weight_decay": Maps(("optimizer.weight_decay",), DECAY, default=0.0),
        "set_grad_none": _FUSED,
    },
    "muon": {
        "adam_lr": Maps(("optimizer.learning_rate",), "also of Muon's matrices, whose step has the size of Adam's"),
        **_all(Ignored("the step of Muon has the size of Adam's, so adam_lr is the rate of both"), "", "lr muon_lr"),
        "momentum": Maps(("optimizer.momentum",), "matrices of layers in a loop use Muon", default=0.95),
        "betas": Maps(("optimizer.beta1", "optimizer.beta2"), default=(0.9, 0.95)),
        "eps": Maps(("optimizer.epsilon",), default=1e-10),
        "weight_decay": Maps(("optimizer.weight_decay",), DECAY, default=0.0),
        "ns_method": _FUSED,
    },
}
OPTIMIZER_NAMES = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "lion": "lion", "muon": "muon"}
OTHER_OPTIMIZERS = {  # what to pass as initialize(optimizer=...)
    "lamb": "optax.lamb(...)",
    "adagrad": "optax.adagrad(...)",
    "onebitadam": "optax.adamw(...), whose gradients are exchanged in precision.reduce_dtype",
    "zerooneadam": "optax.adamw(...), whose gradients are exchanged in precision.reduce_dtype",
    "onebitlamb": "optax.lamb(...), whose gradients are exchanged in precision.reduce_dtype",
}

LAG = "DeepSpeed's rate is up to two steps behind: its first two steps have the initial rate"
REPLACES = "replaces optimizer.params.lr"
WARMUP: Keys = {
    "warmup_num_steps": _joint("schedule.warmup_steps", note=LAG, default=1000),
    "warmup_type": _joint("schedule.warmup_kind", default="log"),
    "last_batch_iteration": Ignored("the training state counts the steps"),
}
LOWER_RATE = "as shares of the peak"
DECAYING: Keys = {"total_num_steps": _joint("schedule.decay_steps", "training.steps")}
SCHEDULERS: dict[str, Keys] = {
    "WarmupLR": {
        **WARMUP,
        "warmup_min_lr": _joint("schedule.initial_share", note=LOWER_RATE, default=0),
        "warmup_max_lr": _joint("optimizer.learning_rate", note=REPLACES),
    },
    "WarmupDecayLR": {
        **WARMUP,
        **DECAYING,
        "warmup_min_lr": _joint("schedule.initial_share", "schedule.final_share", note=LOWER_RATE, default=0),
        "warmup_max_lr": _joint("optimizer.learning_rate", note=REPLACES, default=1e-3),
    },
    "WarmupCosineLR": {
        **WARMUP,
        **DECAYING,
        "warmup_min_ratio": _joint("schedule.initial_share", default=0),
        "cos_min_ratio": Maps(("schedule.final_share",), default=1e-4),
    },
}
SCHEDULE_KINDS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}

MEMORY: Keys = {
    "activation_checkpointing.cpu_checkpointing": Maps(
        ("remat.offload",),
        "of the decoder; another model names what it offloads in jax.checkpoint",
        {True: ("block_input",), False: ()},
        "set true or false",
    ),
    "activation_checkpointing.partition_activations": Ignored(
        "the compiler divides activations; sharding.sequence_parallel does in the decoder"
    ),
    **_all(RECOMPUTES, "activation_checkpointing.", "contiguous_memory_optimization number_checkpoints"),
    **_all(RECOMPUTES, "activation_checkpointing.", "synchronize_checkpoint_boundary profile"),
}

LOGGING: Keys = {
    "steps_per_print": Maps(("logging.every",)),
    "tensorboard.enabled": Maps(("logging.tensorboard",)),
    **_all(Ignored("records go to tensorboard/ in run.directory"), "tensorboard.", "output_path job_name"),
    "wandb.enabled": _joint("logging.wandb_project"),
    "wandb.project": _joint("logging.wandb_project"),
    **_all(Ignored("set WANDB_ENTITY and WANDB_RUN_GROUP in the environment"), "wandb.", "team group"),
    "csv_monitor": Ignored("records are in metrics.jsonl in run.directory"),
    "comet": Refused("set wandb or tensorboard"),
    "flops_profiler": Ignored("jaxopt-llm plan prints FLOPs; profile.start_step writes a trace"),
    **_all(Ignored("profile.start_step writes a trace"), "", "wall_clock_breakdown memory_breakdown comms_logger"),
    "timers": Ignored("profile.start_step writes a trace"),
    **_all(Ignored("config.json and the log have it"), "", "dump_state log_level"),
}

OTHERS: Keys = {
    "checkpoint.use_node_local_storage": Refused("checkpoints need a folder that all hosts share"),
    **_all(CHECKPOINTS, "checkpoint.", "tag_validation load_universal parallel_write checkpoint_serialization writer"),
    **_all(Ignored("the compiler compiles the whole step"), "", "compile graph_harvesting"),
    "aio": ONLY_NVME,
    "vocabulary_size": Ignored("the model has it"),
    "elasticity": Refused("a run resumes on any mesh; set train_batch_size"),
    "sparse_attention": Refused("write the mask in the model; model.pattern=sliding in the decoder"),
    "compression_training": Refused("the nearest is precision.matmul=int8_qat of the decoder"),
    "quantize_training": Refused("the nearest is precision.matmul=int8_qat of the decoder"),
    "weight_quantization": Refused("the nearest is lora.base=int8 of the decoder"),
    "data_efficiency": Refused("choose the batches that step() gets"),
    "curriculum_learning": Refused("choose the batches that step() gets"),
    "progressive_layer_drop": Refused("write it in the model"),
    "eigenvalue": Refused("write it in the loss, as a metric"),
    "hybrid_engine": Refused("generate with Engine.model()"),
    "autotuning": Refused("jaxopt-llm plan --search chooses the settings"),
    "nebula": Refused("Engine.save writes checkpoints"),
    "datastates_ckpt": Refused("Engine.save writes checkpoints"),
}

KEYS: Keys = {
    **BATCH,
    **PARALLELISM,
    **{f"zero_optimization.{name}": entry for name, entry in ZERO.items()},
    **PRECISION,
    **GRADIENTS,
    **MEMORY,
    **LOGGING,
    **OTHERS,
}
