"""DeepSpeed configurations: files as people write them, what becomes of each key, and which are refused."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import ROOT, command

from jaxopt_llm.config import Config, cli, fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.deepspeed import read_deepspeed, read_file
from jaxopt_llm.engine.deepspeed_keys import FP16, KEYS, OPTIMIZERS, SCHEDULERS, Ignored, Keys, Maps, Refused
from jaxopt_llm.engine.deepspeed_keys import TRAINER as TRAINER_DEFAULTS
from jaxopt_llm.step.hyperparameters import find_shape, make_schedule

ADAM = {"optimizer.beta2": 0.999, "optimizer.weight_decay": 0.0}
CONSTANT = {"schedule.kind": "constant", "schedule.warmup_steps": 0}  # without a scheduler
FLOAT32 = {"precision.compute_dtype": "float32"}
# The example of DeepSpeed's README and of its page "Getting started".
CLASSIC = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
    "fp16": {"enabled": True},
    "zero_optimization": True,
}
HUGGING_FACE = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
ZERO_2 = {
    "stage": 2,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
ZERO_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
OFFLOADED = ZERO_3 | {
    "offload_optimizer": {"device": "cpu", "pin_memory": True, "buffer_count": 4, "fast_init": False},
    "offload_param": {"device": "cpu", "pin_memory": True, "nvme_path": "/local_nvme"},
}
MEGATRON = {
    "train_batch_size": 512,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "zero_optimization": {"stage": 1, "elastic_checkpoint": True},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "bf16",
    "bf16": {"enabled": True, "immediate_grad_update": True},
    "wall_clock_breakdown": True,
    "comms_logger": {"enabled": False, "verbose": True},
    "tensor_parallel": {"autotp_size": 2},
    "wandb": {"enabled": True, "team": "us", "project": "megatron"},
}
WARMUP_DECAY = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 3e-7}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "last_batch_iteration": -1,
            "total_num_steps": 5000,
            "warmup_min_lr": 0,
            "warmup_max_lr": 6e-5,
            "warmup_num_steps": 500,
            "warmup_type": "linear",
        },
    },
    "fp16": {"enabled": True, "loss_scale": 0.0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2},
    "tensorboard": {"enabled": True, "output_path": "logs/", "job_name": "bert"},
    "zero_allow_untested_optimizer": True,
    "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1},
}
CHECKPOINTED = {
    "train_batch_size": 32,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "gradient_clipping": 0.0,
    "activation_checkpointing": {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": False,
        "number_checkpoints": None,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    },
    "csv_monitor": {"enabled": True, "output_path": "csv"},
    "checkpoint": {"tag_validation": "Warn", "load_universal": False, "use_node_local_storage": False},
    "elasticity": {"enabled": False},
}
ZERO_PLUS_PLUS = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "amp": {"enabled": "auto", "opt_level": "auto"},
    "zero_optimization": {
        "stage": 3,
        "contiguous_gradients": True,
        "zero_hpz_partition_size": 4,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    },
}
TRAINER = {  # the defaults of Hugging Face's TrainingArguments
    "optimizer.learning_rate": 5e-5,
    **ADAM,
    **CONSTANT,
    **FLOAT32,
    "training.batch_size": 64,  # 8 for each of 8 devices
}
COMMUNICATION = ["zero_optimization.overlap_comm", "zero_optimization.contiguous_gradients"]
STAGE_3 = [f"zero_optimization.{name}" for name in ZERO_3 if name not in ("stage", "offload_param")]
# Settings that differ from `Config()`, and the ignored keys, with eight devices.
FILES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "classic": (
        CLASSIC,
        {
            "training.batch_size": 8,
            "mesh.fsdp": 8,
            "optimizer.learning_rate": 0.00015,
            **ADAM,
            **CONSTANT,
            "precision.compute_dtype": "float16",
            "precision.loss_scale_growth_interval": 1000,
            "sharding.zero_stage": 1,
        },
        [],
    ),
    "Hugging Face, ZeRO-2": (
        HUGGING_FACE | {"zero_optimization": ZERO_2},
        {
            **TRAINER,
            "mesh.fsdp": 8,
            "sharding.zero_stage": 2,
            "offload.optimizer": True,
            "logging.every": 2000,
        },
        [
            *(f"fp16.{name}" for name in HUGGING_FACE["fp16"] if name != "enabled"),
            "scheduler.params.warmup_min_lr",
            "wall_clock_breakdown",
            "zero_optimization.offload_optimizer.pin_memory",
            *(f"zero_optimization.{name}" for name in ZERO_2 if name not in ("stage", "offload_optimizer")),
        ],
    ),
    "Hugging Face, ZeRO-3": (
        HUGGING_FACE | {"zero_optimization": ZERO_3},
        {**TRAINER, "mesh.fsdp": 8, "logging.every": 2000},
        [
            *(f"fp16.{name}" for name in HUGGING_FACE["fp16"] if name != "enabled"),
            "scheduler.params.warmup_min_lr",
            "wall_clock_breakdown",
            *STAGE_3,
        ],
    ),
    "ZeRO-3 with offload": (
        {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": OFFLOADED},
        {
            "training.batch_size": 16,
            "mesh.fsdp": 8,
            **CONSTANT,
            "offload.optimizer": True,
            "offload.parameters": True,
        },
        [
            *STAGE_3,
            *(f"zero_optimization.offload_optimizer.{name}" for name in ("pin_memory", "buffer_count", "fast_init")),
            *(f"zero_optimization.offload_param.{name}" for name in ("pin_memory", "nvme_path")),
        ],
    ),
    "Megatron-DeepSpeed": (
        MEGATRON,
        {
            "training.batch_size": 512,
            "training.accumulation": 32,
            "mesh.fsdp": 4,
            "mesh.tensor": 2,
            **CONSTANT,
            "sharding.zero_stage": 1,
            "precision.reduce_dtype": "bfloat16",
            "logging.wandb_project": "megatron",
        },
        [
            "zero_optimization.elastic_checkpoint",
            "prescale_gradients",
            "data_types.grad_accum_dtype",
            "bf16.immediate_grad_update",
            "wall_clock_breakdown",
            "comms_logger",
            "wandb.team",
            "wandb.enabled",
        ],
    ),
    "warm-up and decay": (
        WARMUP_DECAY,
        {
            "training.steps": 5000,
            "training.batch_size": 256,
            "training.accumulation": 2,
            "mesh.fsdp": 8,
            "optimizer.learning_rate": 6e-5,
            "optimizer.beta1": 0.8,
            "optimizer.beta2": 0.99,
            "optimizer.epsilon": 1e-6,
            "optimizer.weight_decay": 3e-7,
            "schedule.kind": "linear",
            "schedule.warmup_steps": 500,
            "schedule.decay_steps": 5000,
            "schedule.final_share": 0.0,
            "precision.compute_dtype": "float16",
            "precision.initial_loss_scale": 4096.0,
            "precision.loss_scale_growth_interval": 500,
            "sharding.zero_stage": 0,
        },
        [
            *("optimizer.params.lr", "scheduler.params.last_batch_iteration"),
            *("fp16.loss_scale", "fp16.hysteresis", "tensorboard.output_path", "tensorboard.job_name"),
            *("zero_allow_untested_optimizer", "flops_profiler"),
        ],
    ),
    "ZeRO++": (
        ZERO_PLUS_PLUS,
        {
            "training.batch_size": 16,
            "mesh.fsdp": 4,
            "mesh.data": 2,
            "sharding.optimizer_over_data": True,
            "sharding.int8_gathers": ("data", "fsdp"),
            "sharding.fsdp_gradients": "int4",
            "sharding.data_gradients": "int4",
            **CONSTANT,
        },
        ["amp", "zero_optimization.contiguous_gradients"],
    ),
    "activation checkpointing": (
        CHECKPOINTED,
        {
            "mesh.fsdp": 8,
            "optimizer.name": "sgd",
            "optimizer.learning_rate": 0.1,
            "optimizer.momentum": 0.9,
            "optimizer.weight_decay": 0.0,
            "optimizer.clip_norm": 0.0,
            **CONSTANT,
            **FLOAT32,
            "sharding.zero_stage": 0,
            "remat.offload": ("block_input",),
        },
        [
            "activation_checkpointing.partition_activations",
            *(
                f"activation_checkpointing.{name}"
                for name in ("contiguous_memory_optimization", "synchronize_checkpoint_boundary", "profile")
            ),
            *("csv_monitor", "checkpoint.tag_validation", "checkpoint.load_universal"),
            *("checkpoint.use_node_local_storage", "elasticity"),
        ],
    ),
}
NVME = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 5}}
ONE_BIT = {
    "train_batch_size": 4096,
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23000, "comm_backend_name": "nccl"}},
}
ELASTIC = {
    "elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "version": 0.1}
}


def adam(**parameters: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "Adam", "params": parameters}}


def scheduler(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": parameters}}


L2 = (
    "DeepSpeed adds it to the gradient (L2), and ours is decoupled; set 0, or pass "
    "initialize(optimizer=optax.chain(optax.add_decayed_weights(0.01), ...)) and remove it"
)
OPTAX = "the nearest is an optax schedule: pass initialize(optimizer=...) and remove it"
REFUSED = {
    "ZeRO-Infinity on NVMe": (
        {"train_batch_size": 8, "zero_optimization": NVME, "aio": {"block_size": 262144}},
        'zero_optimization.offload_param.device="nvme": there is no offload to NVMe; set "cpu"',
    ),
    "1-bit Adam": (
        ONE_BIT,
        "optimizer.type=OneBitAdam: pass initialize(optimizer=optax.adamw(...), whose gradients are exchanged in "
        "precision.reduce_dtype) and remove it",
    ),
    "elasticity": (ELASTIC, "elasticity: a run resumes on any mesh; set train_batch_size"),
    "misspelt key": (
        {"train_batch_size": 8, "gradient_accumulation_step": 4},
        "gradient_accumulation_step: unknown key; did you mean gradient_accumulation_steps?",
    ),
    "misspelt key of a section": (
        {"zero_optimization": {"stage": 2, "overlap_com": True}},
        "zero_optimization.overlap_com: unknown key; did you mean zero_optimization.overlap_comm?",
    ),
    "parameter of another optimizer": (
        {"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}},
        "optimizer.params.eps: unknown key; remove it",
    ),
    "contradictory batch sizes": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        "train_batch_size=32 is not train_micro_batch_size_per_gpu=4 × gradient_accumulation_steps=2 × 8 data-parallel "
        "devices = 64; change one of them",
    ),
    "indivisible batch": (
        {"train_batch_size": 36, "gradient_accumulation_steps": 2},
        "train_batch_size=36 is not divisible by gradient_accumulation_steps=2 × 8 data-parallel devices; change one "
        "of them",
    ),
    "no batch for all devices": (
        {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4},
        "train_batch_size=12 is not train_micro_batch_size_per_gpu=4 × gradient_accumulation_steps=1 × 8 data-parallel "
        "devices = 32; change one of them",
    ),
    "indivisible devices": (
        {"tensor_parallel": {"autotp_size": 3}},
        "8 devices are not divisible by tensor_parallel.autotp_size=3; change one of them",
    ),
    "another number of devices": (
        {"data_parallel_size": 8, "sequence_parallel_size": 2},
        "data_parallel_size=8: 8 devices are 2 × 4; remove it",
    ),
    "static loss scale": (
        {"fp16": {"enabled": True, "loss_scale": 128}},
        "fp16.loss_scale=128: the scale is dynamic; set 0, or use bf16",
    ),
    "both precisions": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16.enabled and bf16.enabled are both true; keep one",
    ),
    "L2 in Adam": (
        adam(adam_w_mode=False, weight_decay=0.01),
        f"optimizer.params.weight_decay=0.01 with adam_w_mode=false: {L2}",
    ),
    "L2 in SGD": (
        {"optimizer": {"type": "SGD", "params": {"momentum": 0.9, "weight_decay": 0.01}}},
        f"optimizer.params.weight_decay=0.01 with momentum: {L2}",
    ),
    "decay of PyTorch": (
        adam(torch_adam=True),
        "optimizer.params.weight_decay is absent: PyTorch's AdamW takes 0.01 for it, DeepSpeed's 0; give it",
    ),
    "no bias correction": (
        adam(bias_correction=False),
        "optimizer.params.bias_correction=false: moments are corrected; remove it",
    ),
    "rate of Muon": (
        {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}},
        "optimizer.params.adam_lr is absent: the step of Muon here has the size of Adam's, so DeepSpeed's rate of Muon "
        "does not fit; give the rate of Adam",
    ),
    "optimizer of PyTorch": (
        {"optimizer": {"type": "RMSprop", "params": {"alpha": 0.9}}},
        "optimizer.type=RMSprop: pass initialize(optimizer=an optax transformation) and remove it",
    ),
    "one cycle": (
        scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1),
        f"scheduler.type=OneCycle: {OPTAX}",
    ),
    "unknown warm-up": (
        scheduler("WarmupLR", warmup_type="cosine"),
        'scheduler.params.warmup_type="cosine": set "log" or "linear"',
    ),
    "warm-up from above": (
        scheduler("WarmupLR", warmup_min_lr=0.1, warmup_max_lr=0.01),
        "scheduler.params.warmup_min_lr=0.1: must be from 0 to 0.01",
    ),
    "length of the warm-up": (
        scheduler("WarmupLR", warmup_num_steps=1.5),
        "scheduler.params.warmup_num_steps=1.5: must be a whole number",
    ),
    "automatic number of steps": (
        scheduler("WarmupDecayLR", total_num_steps="auto"),
        'scheduler.params.total_num_steps="auto": Hugging Face\'s Trainer has no default for it; give a value',
    ),
    "automatic stage": (
        {"zero_optimization": {"stage": "auto"}},
        'zero_optimization.stage="auto": Hugging Face\'s Trainer has no default for it; give a value',
    ),
    "settings of this package": (
        {"mesh": {"fsdp": 8}},
        "mesh: unknown key; settings of this package are given as Config(mesh=...)",
    ),
    "no end of the decay": (scheduler("WarmupDecayLR"), "scheduler.params.total_num_steps is absent; give it"),
    "decay within the warm-up": (
        scheduler("WarmupDecayLR", total_num_steps=100),
        "schedule.warmup_steps=1000: must be below schedule.decay_steps=100",
    ),
    "wrong type": (adam(lr="1e-4"), 'optimizer.params.lr="1e-4": must be 0 or a normal float32 number, such as 0.001'),
    "wrong flag": ({"bf16": {"enabled": "true"}}, 'bf16.enabled="true": must be true or false'),
    "wrong number": ({"train_batch_size": 8.5}, "train_batch_size=8.5: must be a whole number of at least 1"),
    "part of a step": (
        scheduler("WarmupDecayLR", total_num_steps=5000.5),
        "scheduler.params.total_num_steps=5000.5: must be a whole number below 2**31, such as 1000",
    ),
    "clip of the optimizer": (adam(max_grad_norm=1.0), "optimizer.params.max_grad_norm=1.0: set gradient_clipping"),
    "one beta": (adam(betas=[0.9]), "optimizer.params.betas=[0.9]: must have 2 entries"),
    "no object": ({"bf16": True}, "bf16: must be an object of keys and values"),
    "stage 4": ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4: must be one of 0, 1, 2, 3"),
    "parts of ZeRO++": (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3, "zeropp_loco_param": {"err_beta": 0.8}}},
        'zero_optimization.zeropp_loco_param={"err_beta": 0.8}: no error of the codes is carried over to the next '
        "step; remove it; zero_optimization.zero_hpz_partition_size=3 does not divide 8 data-parallel devices; change "
        "it",
    ),
    "two group sizes": (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4, "mics_shard_size": 4}},
        "zero_optimization.zero_hpz_partition_size and zero_optimization.mics_shard_size: keep one",
    ),
    "names of no key": (
        {"mp_size": 2, "pp_size": 2},
        "mp_size=2: it is no key of DeepSpeed; set tensor_parallel.autotp_size; pp_size=2: it is no key of DeepSpeed; "
        "set pipeline.stages",
    ),
}


def changes(config: Config) -> dict[str, Any]:
    default = Config()
    values = {name: fields.get_field(config, name) for name in fields.FIELDS}
    return {name: value for name, value in values.items() if value != fields.get_field(default, name)}


@pytest.mark.parametrize("name", FILES)
def test_settings_and_ignored_keys(name: str) -> None:
    settings, expected, ignored = FILES[name]
    read = read_deepspeed(json.loads(json.dumps(settings)), "ds.json", devices=8)
    assert changes(read.config) == expected
    assert sorted(read.ignored) == sorted(ignored)
    text = "\n".join(read.lines())
    for key in _leaves(settings):
        assert re.search(rf"(^|[\s]){re.escape(key)}[,:\s]", text), f"nothing is said of {key}"


def _leaves(settings: dict[str, Any], prefix: str = "") -> list[str]:
    """The keys of a file that have a value, down to those that the tables have as a whole."""
    found = []
    for name, value in settings.items():
        key = prefix + name
        if isinstance(value, dict) and key not in KEYS:
            found += _leaves(value, f"{key}.")
        elif value is not None:
            found.append(key + ".stage" * (name == "zero_optimization"))
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_equivalent_is_one_line(name: str) -> None:
    settings, message = REFUSED[name]
    with pytest.raises(InputError) as raised:
        read_deepspeed(settings, "ds.json", devices=8)
    assert str(raised.value) == f"ds.json: {message}"


def show(settings: dict[str, Any], key: str, rows: int | None = None) -> list[str]:
    """Return the columns of the account for a key, with eight devices."""
    lines = read_deepspeed(settings, "ds.json", 8, rows).lines()
    (line,) = (line for line in lines if line.startswith(f"  {key} "))
    return re.split(r" {2,}", line.strip())


def test_automatic_values_are_those_of_the_trainer_and_said_so() -> None:
    assert show(HUGGING_FACE, "optimizer.params.betas") == [
        'optimizer.params.betas = "auto"',
        "optimizer.beta1 = 0.9, optimizer.beta2 = 0.999",
        "the Trainer's default",
    ]


@pytest.mark.slow
def test_the_defaults_of_the_trainer_hf_torch() -> None:
    arguments = pytest.importorskip("transformers").TrainingArguments
    found = {each.name: each.default for each in dataclasses.fields(arguments)}
    assert {
        "gradient_accumulation_steps": found["gradient_accumulation_steps"],
        "train_micro_batch_size_per_gpu": found["per_device_train_batch_size"],
        "gradient_clipping": found["max_grad_norm"],
        "optimizer.params.lr": found["learning_rate"],
        "optimizer.params.betas": [found["adam_beta1"], found["adam_beta2"]],
        "optimizer.params.eps": found["adam_epsilon"],
        "optimizer.params.weight_decay": found["weight_decay"],
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": found["learning_rate"],
        "scheduler.params.warmup_num_steps": found["warmup_steps"],
        "fp16.enabled": found["fp16"],
        "bf16.enabled": found["bf16"],
    } == TRAINER_DEFAULTS


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "as optimizer.params.lr"),
        (scheduler("WarmupLR", warmup_max_lr=1e-3), "as scheduler.params.warmup_max_lr"),
    ],
)
def test_an_automatic_rate_is_the_one_that_the_file_gives(given: dict[str, Any], expected: str) -> None:
    """The Trainer has one learning rate for both, and refuses files that give another one."""
    read = read_deepspeed(HUGGING_FACE | given, "ds.json", 8)
    assert read.config.optimizer.learning_rate == 1e-3
    assert expected in "\n".join(read.lines())


@pytest.mark.parametrize(
    ("sizes", "rows", "expected", "note"),
    [
        (("auto", "auto", "auto"), 64, (64, 1), "rows of the example"),
        (("auto", "auto", 2), 48, (48, 2), "rows of the example"),
        (("auto", "auto", "auto"), None, (64, 1), "8 × 1 × 8"),
        (("auto", 4, "auto"), 32, (32, 1), "4 × 1 × 8"),
        ((64, 4, "auto"), 64, (64, 2), "4 × 2 × 8"),
        ((64, "auto", 2), 64, (64, 2), "4 × 2 × 8"),
        ((None, None, None), 48, (48, 1), "rows of the example"),
        ((None, None, 2), 48, (48, 2), "rows of the example"),
    ],
)
def test_the_batch_sizes_that_are_shown_are_those_that_run(
    sizes: tuple[Any, ...], rows: int | None, expected: tuple[int, int], note: str
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    settings = dict(zip(names, sizes, strict=True))
    config = read_deepspeed(settings, "ds.json", 8, rows).config
    assert (config.training.batch_size, config.training.accumulation) == expected
    assert show(settings, names[0], rows)[1:] == [f"training.batch_size = {expected[0]}", note]
    assert show(settings, names[2], rows)[1] == f"training.accumulation = {expected[1]}"


def test_the_keys_of_zero_plus_plus_follow_the_mesh() -> None:
    """DeepSpeed reads them in stage 3 only."""
    codes = {"zero_quantized_weights": True, "zero_quantized_gradients": True}

    def read(devices: int, **zero: Any) -> dict[str, Any]:
        config = read_deepspeed({"zero_optimization": {"stage": 3, **codes, **zero}}, "ds.json", devices).config
        return {name: value for name, value in changes(config).items() if name.startswith(("sharding.", "mesh."))}

    over_fsdp = {"mesh.fsdp": 8, "sharding.int8_gathers": ("fsdp",), "sharding.fsdp_gradients": "int4"}
    assert read(8) == read(8, zero_hpz_partition_size=1) == read(8, zero_hpz_partition_size=8) == over_fsdp
    assert read(8, mics_shard_size=4) == over_fsdp | {
        "mesh.fsdp": 4,
        "mesh.data": 2,
        "sharding.data_gradients": "int4",
    }
    assert read(1) == {"mesh.fsdp": 1}
    assert read(8, stage=2, zero_hpz_partition_size=4) == {"mesh.fsdp": 8, "sharding.zero_stage": 2}


@pytest.mark.parametrize(
    ("sizes", "devices", "expected"),
    [
        ((64, 4, None), 8, (64, 2, 8)),
        ((64, None, 2), 8, (64, 2, 8)),
        ((None, 4, 2), 8, (64, 2, 8)),
        ((64, None, None), 8, (64, 1, 8)),
        ((None, 4, None), 8, (32, 1, 8)),
        ((64, 4, 2), 8, (64, 2, 8)),
        ((64, 4, 2), None, (64, 2, 8)),
        ((64, None, 2), None, (64, 2, "auto")),
        ((None, None, 2), 8, (Config().training.batch_size, 2, 8)),
    ],
)
def test_batch_sizes(sizes: tuple[int | None, ...], devices: int | None, expected: tuple[int, ...]) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = read_deepspeed(dict(zip(names, sizes, strict=True)), "ds.json", devices).config
    assert (config.training.batch_size, config.training.accumulation, config.mesh.fsdp) == expected


def test_a_size_for_each_gpu_needs_their_number() -> None:
    with pytest.raises(InputError, match="train_micro_batch_size_per_gpu=4: the number of devices is unknown"):
        read_deepspeed({"train_micro_batch_size_per_gpu": 4}, "ds.json")


def test_a_whole_number_may_be_written_as_1e5() -> None:
    counts = {"train_batch_size": 64.0, "gradient_accumulation_steps": 2.0, "steps_per_print": 1e5}
    settings = counts | scheduler("WarmupDecayLR", total_num_steps=2e4, warmup_num_steps=1e3)
    whole = json.loads(json.dumps(settings), parse_float=lambda text: int(float(text)))
    read = read_deepspeed(settings | {"zero_optimization": {"stage": 2.0}}, "ds.json", devices=8)
    assert read.config == read_deepspeed(whole | {"zero_optimization": {"stage": 2}}, "ds.json", devices=8).config
    assert (read.config.logging.every, read.config.schedule.warmup_steps) == (100_000, 1000)


def test_axes_share_the_devices() -> None:
    settings = {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2, "pipeline": {"stages": 2}}
    mesh = read_deepspeed(settings, "ds.json", devices=16).config.mesh
    assert (mesh.pipeline, mesh.fsdp, mesh.context, mesh.tensor) == (2, 2, 2, 2)


def test_absent_keys_have_the_defaults_of_deepspeed() -> None:
    """Without a clip, a decay, a warm-up or ZeRO in the file, there is what DeepSpeed does without them."""
    read = read_deepspeed({"optimizer": {"type": "Adam"}}, "ds.json", devices=1)
    rate = {"optimizer.learning_rate": 1e-3}
    assert changes(read.config) == {**rate, **ADAM, **CONSTANT, **FLOAT32, "sharding.zero_stage": 0, "mesh.fsdp": 1}
    assert read.config.optimizer.clip_norm == 1.0  # since 0.19.3
    assert "gradient_clipping absent" in "\n".join(read.lines())


PEAK, LOW, END, FLOOR = 1e-3, 2e-4, 50, 0.2


def deepspeed_rate(kind: str, shape: str, low: float, iteration: int, warmup: int) -> float:
    """The rate by deepspeed/runtime/lr_schedules.py. Its scheduler is at iteration -1 in the first step."""
    if iteration < warmup:
        risen = math.log(iteration + 1) / math.log(warmup) if shape == "log" else iteration / warmup
        return low + (PEAK - low) * risen
    if kind == "WarmupLR":
        return PEAK
    if kind == "WarmupDecayLR":  # from the lower rate, not from 0
        return low + (PEAK - low) * max(0.0, (END - iteration) / (END - warmup))
    progress = min(1.0, (iteration - warmup + 1) / (END - warmup))
    return PEAK * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2)


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("shape", ["log", "linear"])
@pytest.mark.parametrize("low", [0.0, LOW])
@pytest.mark.parametrize("warmup", [1, 2, 10])
def test_rates_are_those_of_deepspeed_one_or_two_steps_earlier(kind: str, shape: str, low: float, warmup: int) -> None:
    parameters: dict[str, Any] = {"warmup_num_steps": warmup}
    parameters |= {"warmup_type": "linear"} if shape == "linear" else {}  # log is the default
    parameters |= {"warmup_min_ratio": low / PEAK} if kind == "WarmupCosineLR" else {"warmup_min_lr": low}
    parameters |= {"warmup_max_lr": PEAK} if kind == "WarmupDecayLR" else {}
    parameters |= {"total_num_steps": END} if kind != "WarmupLR" else {}
    parameters |= {"cos_min_ratio": FLOOR} if kind == "WarmupCosineLR" else {}
    settings = {"optimizer": {"type": "Adam", "params": {"lr": PEAK}}} | scheduler(kind, **parameters)
    config = read_deepspeed(settings, "ds.json", devices=1).config
    numbers = find_shape(config.optimizer.learning_rate, config.schedule, config.training.steps)
    rates = np.asarray(make_schedule(config.schedule.kind, numbers, config.schedule.warmup_kind)(np.arange(60)))
    length = max(warmup, 2)
    for step in range(1, 61):
        if kind == "WarmupCosineLR" and step == length:
            continue  # DeepSpeed's cosine does not begin at the peak
        lag = 1 if kind == "WarmupCosineLR" and step > length else 0
        expected = deepspeed_rate(kind, shape, low, step - lag, length)
        assert rates[step - 1] == pytest.approx(expected, rel=1e-5, abs=1e-12), step


# The top-level keys of DeepSpeed's configuration page and of deepspeed/runtime/config.py.
DOCUMENTED = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation optimizer
    scheduler communication_data_type gradient_allreduce_op prescale_gradients gradient_predivide_factor
    sparse_gradients fp16 bf16 amp torch_autocast gradient_clipping zero_optimization aio tensor_parallel hybrid_engine
    expert_parallel steps_per_print wall_clock_breakdown dump_state autotuning flops_profiler activation_checkpointing
    sparse_attention data_efficiency curriculum_learning tensorboard wandb comet csv_monitor elasticity comms_logger
    compression_training checkpoint compile data_types
    bfloat16 disable_allgather seq_parallel_communication_data_type graph_harvesting zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer memory_breakdown use_data_before_expert_parallelism pipeline progressive_layer_drop
    quantize_training dataloader_drop_last log_level nebula datastates_ckpt weight_quantization timers vocabulary_size
    sequence_parallel_size data_parallel_size
"""
# The keys of zero_optimization on that page and in deepspeed/runtime/zero/config.py.
DOCUMENTED_ZERO = """
    stage allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size contiguous_gradients
    load_from_fp32_weights grad_hooks round_robin_gradients offload_param offload_optimizer stage3_max_live_parameters
    stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold
    stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold zero_hpz_partition_size
    zero_quantized_weights zero_quantized_gradients log_trace_cache_warnings cpu_offload
    use_multi_rank_bucket_allreduce elastic_checkpoint zenflow sub_group_size cpu_offload_param
    cpu_offload_use_pin_memory stage3_model_persistence_threshold stage3_use_all_reduce_for_fetch_params
    stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1
    zero_quantized_nontrainable_weights zeropp_loco_param mics_shard_size mics_hierarchical_params_gather
    memory_efficient_linear pipeline_loading_checkpoint override_module_apply enable_sanity_checks
    save_muon_momentum_buffer_in_memory leaf_module
"""


def test_every_documented_key_is_mapped_ignored_or_refused() -> None:
    known = {key.split(".")[0] for key in KEYS} | {"bfloat16"}  # an old name of bf16
    assert set(DOCUMENTED.split()) <= known
    zero = {key.split(".")[1] for key in KEYS if key.startswith("zero_optimization.")}
    assert set(DOCUMENTED_ZERO.split()) <= zero


def all_keys() -> Keys:
    optimizers = {f"{kind} {name}": entry for kind, keys in OPTIMIZERS.items() for name, entry in keys.items()}
    schedulers = {f"{kind} {name}": entry for kind, keys in SCHEDULERS.items() for name, entry in keys.items()}
    return KEYS | FP16 | optimizers | schedulers


def test_the_tables_name_settings_and_reasons() -> None:
    for key, entry in all_keys().items():
        match entry:
            case Maps(settings):
                assert set(settings) <= set(fields.FIELDS), key
            case Ignored(reason) | Refused(reason):
                assert reason, key
    prefixes = [key for key in KEYS if any(other.startswith(f"{key}.") for other in KEYS)]
    assert not prefixes, "a key that stands for a section hides those below it"


def test_the_old_forms() -> None:
    old = {"bfloat16": {"enabled": True}, "zero_optimization": {"stage": 2, "cpu_offload": True}}
    config = read_deepspeed(old, "ds.json", devices=1).config
    assert (config.precision.compute_dtype, config.offload.optimizer) == ("bfloat16", True)


def test_a_section_that_is_off_refuses_nothing() -> None:
    bf16 = {"enabled": False, "bf16_master_weights_and_grads": True}
    read = read_deepspeed({"bf16": bf16, "wandb": {"enabled": False, "project": "mine"}}, "ds.json", devices=1)
    assert read.ignored["bf16.bf16_master_weights_and_grads"] == "bf16.enabled is not true"
    assert read.ignored["wandb.project"] == "wandb.enabled is not true"
    assert (read.config.precision.compute_dtype, read.config.logging.wandb_project) == ("float32", "")


def test_muon() -> None:
    settings = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "adam_lr": 3e-4}}}
    read = read_deepspeed(settings, "ds.json", devices=1)
    chosen = {name: value for name, value in changes(read.config).items() if name.startswith("optimizer.")}
    assert chosen == {
        "optimizer.name": "muon",
        "optimizer.momentum": 0.9,
        "optimizer.epsilon": 1e-10,
        "optimizer.weight_decay": 0.0,
    }
    assert "optimizer.params.lr" in read.ignored


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'a': 1}", "ds.json: invalid JSON (Expecting property name"),
        (
            '{"fp16": {"enabled": true, "enabled": false}}',
            "ds.json: invalid JSON ('enabled' appears twice",
        ),
        ("[]", "ds.json: not an object of keys and values"),
    ],
)
def test_files_that_are_no_configuration(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(InputError) as raised:
        read_file(tmp_path / "ds.json")
    assert message in str(raised.value)


def test_the_command_writes_a_recipe(tmp_path: Path) -> None:
    source, recipe = tmp_path / "ds.json", tmp_path / "recipe.py"
    source.write_text(json.dumps(WARMUP_DECAY))
    arguments = ("deepspeed", source, "--output", recipe, "--devices", 8)
    done = command("import_config", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    read = read_file(source, 8)
    assert done.stdout == "\n".join([*read.lines(), f"written: {recipe}", ""])
    assert cli.load_recipe(str(recipe)) == read.config
    text = recipe.read_text()
    again = command("import_config", *arguments)
    assert (again.returncode, recipe.read_text()) == (2, text)
    assert again.stderr == f"error: --output {recipe}: it exists; name a new file\n"


def test_the_help_names_the_command_as_it_was_typed() -> None:
    assert command("import_config", "--help").stdout.startswith("usage: python -m jaxopt_llm.import_config ")
    assert command("__main__", "import-config", "--help").stdout.startswith("usage: jaxopt-llm import-config ")


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ELASTIC))
    done = command("import_config", "deepspeed", tmp_path / "ds.json", "--output", tmp_path / "recipe.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: ds.json: {REFUSED['elasticity'][1]}\n"
    assert not (tmp_path / "recipe.py").exists()
    missing = command("import_config", "deepspeed", tmp_path / "no.json", "--output", tmp_path / "recipe.py")
    assert (missing.returncode, missing.stderr) == (2, f"error: there is no file {tmp_path / 'no.json'}\n")


def test_the_tables_of_the_guide_are_up_to_date() -> None:
    script = ROOT / "scripts/deepspeed_page.py"
    done = subprocess.run([sys.executable, script, "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
