"""Configuration of a run, composed of the sections of this package, and its sections that concern the run alone."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Literal

from jaxopt_llm.config.data import PROMPT, DataConfig
from jaxopt_llm.config.metadata import AT_LEAST_ONE, AUTO, NON_NEGATIVE, POSITIVE, Section, section, setting
from jaxopt_llm.config.model import ModelConfig
from jaxopt_llm.config.parallel import (
    DistributedConfig,
    MeshConfig,
    OffloadConfig,
    PipelineConfig,
    RematConfig,
    ShardingConfig,
)
from jaxopt_llm.config.precision import PrecisionConfig
from jaxopt_llm.config.training import (
    DISTILL,
    GRPO,
    NEXT_TOKEN,
    OF_SCORES,
    DistillationConfig,
    EvaluationConfig,
    GrpoConfig,
    LoraConfig,
    OptimizerConfig,
    PreferenceConfig,
    RolloutsConfig,
    ScheduleConfig,
    TrainingConfig,
)


@dataclass(frozen=True)
class CheckpointConfig(Section, path="checkpoint"):
    every: int = setting(500, bounds=AT_LEAST_ONE)
    """Steps between two checkpoints. The last step always has one. A save that failed, or that was left out because the
    saves before were still being written, is retried after a tenth of these steps."""
    keep: int = setting(2, bounds=AT_LEAST_ONE)
    """Number of newest checkpoints to keep (Hugging Face: save_total_limit)."""
    keep_every: int = setting(0, bounds=NON_NEGATIVE)
    """Keep forever the checkpoints at multiples of this number of steps, which must be a multiple of
    checkpoint.every. 0 = off."""
    keep_best: int = setting(0, bounds=NON_NEGATIVE)
    """Number of checkpoints with the lowest held-out loss to keep, among those of steps that are evaluated. 0 = off."""

    replicate_every: int = setting(0, bounds=NON_NEGATIVE)
    """Steps between two copies of the state in the memory of the hosts, for a restart after the loss of one host: each
    host keeps its own part and, where no other host has the same one, also that of the next host. 0 = off."""
    replicate_directory: str = "/dev/shm"
    """Directory in memory for checkpoint.replicate_every, of each host its own. The copies are in a folder there that
    only this user can read."""

    def problems(self) -> list[str]:
        found = self.find_out_of_range()
        every, kept = self.every, self.keep_every
        if every > 0 and kept > 0 and kept % every:
            found.append(f"checkpoint.keep_every={kept}: must be a multiple of checkpoint.every={every}")
        return found

    def is_due(self, step: int, failed: int | None) -> bool:
        """Return whether to save a checkpoint after this step.

        Args:
            failed: step of the last save if that save failed.
        """
        retry = failed is not None and step >= failed + max(1, self.every // 10)
        return retry or step % self.every == 0

    def keeps_forever(self, step: int) -> bool:
        """Return whether `keep_every` keeps the checkpoint of a step."""
        return self.keep_every > 0 and step % self.keep_every == 0


@dataclass(frozen=True)
class WatchdogConfig(Section, path="watchdog"):
    factor: float = setting(10.0, bounds=NON_NEGATIVE)
    """End the job with exit code 5 if a process makes no progress for this multiple of the median of its phase, and at
    least for the floor of the phase. 0 = off."""
    floor_seconds: float = setting(600.0, bounds=POSITIVE)
    """Smallest limit, in seconds, of a step, an evaluation and a wait for data. A batch that takes longer ends the run
    with an error, also without other processes. A save that takes longer is slow: the run says so and goes on."""
    long_floor_seconds: float = setting(3600.0, bounds=POSITIVE)
    """Smallest limit, in seconds, of what may take long: the preparation of a run, which opens its data, a compile, a
    restore, the first step and the first evaluation, which may compile, and a save, which is written in the
    background."""
    single_process: bool = False
    """Also watch a job of one process, whose devices can wait for each other too."""


@dataclass(frozen=True)
class RunConfig(Section, path="run"):
    directory: str = setting("runs/default", resume="freely")
    """Run directory, for config.json, metrics.jsonl and checkpoints/. The same command started again resumes from its
    last checkpoint (Hugging Face: output_dir)."""
    seed: int = setting(0, bounds=NON_NEGATIVE)
    """Seed of the initial parameters and of the order of the data."""
    allow_change: tuple[str, ...] = setting((), resume="freely")
    """Fields that this resume may change although they change what the model learns, such as optimizer.learning_rate.
    Empty = none."""
    deterministic: bool = setting(False, resume="freely")
    """On GPUs, produce the same bits in every run, at some cost in speed. The results of autotuning are kept in the run
    directory."""
    check_replicas: int = setting(0, resume="freely", bounds=NON_NEGATIVE)
    """Steps between two checks of the state for silent corruption; each checkpoint is checked too. Devices that hold
    copies of the same values, such as along mesh.data, compare checksums of their bits. Where masters or moments have
    no copy, the step runs twice from the same state, and the results are compared: this takes twice the memory of the
    state. A difference names the device and ends the run with exit code 9. 0 = off."""

    def problems(self) -> list[str]:
        empty = [] if self.directory else ["run.directory is empty: set --run.directory"]
        return empty + self.find_out_of_range()


Options = dict[str, str | bool | int]


@dataclass(frozen=True)
class XlaConfig(Section, path="xla"):
    options: tuple[str, ...] = ()
    """XLA compiler options for the training step and the held-out loss, each NAME=VALUE, such as
    xla_gpu_autotune_level=0. They override and extend the defaults in compiler/xla_options.py. Names are those of the
    installed jaxlib."""
    own_remat: Literal["auto", "on", "off"] = "auto"
    """Rematerialisation that XLA adds on its own to a program that needs more than about 79% of a GPU's memory. It
    computes again what remat.policy keeps, and may save nothing. off: sets xla_gpu_memory_limit_slop_factor=150. auto:
    off, or on if only then the step fits. Resolved like remat.policy."""

    def problems(self) -> list[str]:
        form = "must be NAME=VALUE with a NAME that begins with xla_"
        wrong = [option for option in self.options if not option.startswith("xla_") or "=" not in option]
        names = [option.partition("=")[0] for option in self.options]
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        found = [f"xla.options: {option!r}: {form}" for option in wrong]
        return found + [f"xla.options: {name} is given twice; give it once" for name in twice]

    def parse_options(self) -> Options:
        """Return the options by name, with booleans parsed. XLA itself parses numbers and enumerations from text."""
        pairs = (option.partition("=") for option in self.options)
        return {name: {"true": True, "false": False}.get(value.lower(), value) for name, _, value in pairs}


@dataclass(frozen=True)
class LoggingConfig(Section, path="logging"):
    every: int = setting(10, bounds=AT_LEAST_ONE)
    """Steps between two logged steps."""
    tensorboard: bool = True
    """Also write the records to tensorboard/ in the run directory."""
    wandb_project: str = ""
    """Weights & Biases project to which the records are also sent. Empty = off."""


@dataclass(frozen=True)
class ProfileConfig(Section, path="profile"):
    start_step: int = setting(0, bounds=NON_NEGATIVE)
    """First step to profile; the trace is written to profile/ in the run directory. 0 = off. Choose a
    later step than the first few, which compile."""
    steps: int = setting(3, bounds=AT_LEAST_ONE)
    """Number of steps to profile."""


@dataclass(frozen=True)
class Config(Section):
    """Settings of a training, by section. A section is an object or a dict, as in `Config(mesh=dict(fsdp=8))`."""

    run: RunConfig = section(RunConfig)
    model: ModelConfig = section(ModelConfig, in_pretrained=True)
    data: DataConfig = section(DataConfig)
    training: TrainingConfig = section(TrainingConfig)
    preference: PreferenceConfig = section(PreferenceConfig)
    distillation: DistillationConfig = section(DistillationConfig)
    rollouts: RolloutsConfig = section(RolloutsConfig)
    grpo: GrpoConfig = section(GrpoConfig)
    lora: LoraConfig = section(LoraConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    schedule: ScheduleConfig = section(ScheduleConfig)
    precision: PrecisionConfig = section(PrecisionConfig)
    mesh: MeshConfig = section(MeshConfig, resume="freely")
    distributed: DistributedConfig = section(DistributedConfig, resume="freely")
    sharding: ShardingConfig = section(ShardingConfig, resume="freely")
    pipeline: PipelineConfig = section(PipelineConfig, resume="freely")
    remat: RematConfig = section(RematConfig, resume="freely")
    offload: OffloadConfig = section(OffloadConfig, resume="freely")
    xla: XlaConfig = section(XlaConfig, resume="freely")
    checkpoint: CheckpointConfig = section(CheckpointConfig, resume="freely")
    evaluation: EvaluationConfig = section(EvaluationConfig, resume="freely")
    logging: LoggingConfig = section(LoggingConfig, resume="freely")
    profile: ProfileConfig = section(ProfileConfig, resume="freely")
    watchdog: WatchdogConfig = section(WatchdogConfig, resume="freely")

    @classmethod
    def explain_unknown(cls, name: str) -> str:
        """Return that there is no such section, and what the user may mean."""
        sections: dict[str, Any] = {field.name: field.default_factory for field in fields(cls)}
        holders = [section for section, made in sections.items() if name in {each.name for each in fields(made)}]
        if holders:
            hint = f"{name} is a setting of {' and of '.join(holders)}, as in Config({holders[0]}=dict({name}=...))"
        elif near := difflib.get_close_matches(name, sections, 1):
            hint = f"did you mean {near[0]}?"
        else:
            hint = f"the sections are {', '.join(sections)}"
        return f"there is no section {name}; {hint}"

    def unroll_problems(self) -> list[str]:
        """List the settings with which the layers cannot be unrolled: `training.unroll`."""
        without_loops: dict[str, Any] = {} if self.remat.policy == AUTO else {"remat.policy": "none"}
        without_loops |= {"remat.every": 1, "remat.offload": (), "offload.parameters": False}
        without_loops |= {"optimizer.in_backward": False, "mesh.pipeline": 1, "precision.compute_dtype_layers": 0}
        return list(self._find_others(without_loops))

    def _find_others(self, needed: Mapping[str, Any]) -> dict[str, str]:
        """Return the settings with another value than the needed one: NAME=VALUE -> how to give them that value."""
        found = {}
        for name, only in needed.items():
            value = attrgetter(name)(self)
            if value != only:
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
                found[f"{name}={shown}"] = "leave it out" if only == () else f"set --{name.replace('_', '-')} {only}"
        return found

    def _refuse_others(self, name: str, needed: Mapping[str, Any]) -> list[str]:
        """List the settings with another value than the only one that `name` supports."""
        return [f"{name} does not support {other}: {remedy}" for other, remedy in self._find_others(needed).items()]

    def _adapter_problems(self) -> list[str]:
        """List the formats of products that adapters or their base do not support."""
        matmul, base, found = self.precision.matmul, self.lora.base, list[str]()
        if self.precision.quantises and self.lora.dora:
            found.append(f"precision.matmul={matmul} does not support lora.dora: set --precision.matmul compute_dtype")
        if self.precision.quantises and base != "float" and (base, matmul) != ("int8", "int8"):
            also = " or int8" if base == "int8" else ""
            found.append(
                f"precision.matmul={matmul} does not support lora.base={base}, whose weights are codes already: set "
                f"--precision.matmul compute_dtype{also}, or --lora.base float"
            )
        return found

    def local_step_problems(self) -> list[str]:
        """List the settings that `training.local_steps` does not support."""
        steps, found = self.training.local_steps, list[str]()
        if steps == 1:
            return []
        if 0 < self.training.steps < steps:
            found.append(
                f"training.local_steps={steps} exceeds training.steps={self.training.steps}, so no outer step follows: "
                f"set --training.steps to at least {steps}"
            )
        # XLA does not nest a region of stages in one of groups: `pipeline` comes before `data` in the mesh.
        needed: dict[str, Any] = {"sharding.optimizer_over_data": False, "mesh.pipeline": 1, "offload.optimizer": False}
        needed |= {"offload.parameters": False, "optimizer.in_backward": False, "training.ema_decay": 0}
        if self.sharding.zero_stage:
            needed["sharding.zero_stage"] = 3
        if self.model.moe.experts and self.mesh.expert > 1:
            # The other exchanges loop until all choices are sent, and groups would wait for each other in every layer.
            needed["sharding.expert_exchange"] = "gather"
        return found + [
            f"training.local_steps={steps} does not support {name}: {remedy}, or --training.local-steps 1"
            for name, remedy in self._find_others(needed).items()
        ]

    @property
    def draws(self) -> bool:
        """True if each step trains on answers that the model draws itself."""
        objective = self.training.objective
        return objective == GRPO or (objective == DISTILL and self.data.content == PROMPT)

    @property
    def runs_teacher(self) -> bool:
        """True if each step runs a teacher forward. Without one, `distill` reads what the data hold of a teacher."""
        return self.training.distills and bool(self.distillation.teacher)

    @property
    def keeps_reference(self) -> bool:
        """True if the model without its adapters can be the reference: the run starts from it, and does not change it.

        A run from adapters of `lora.pretrained` should be compared with these, which are not kept.
        """
        return self.lora.rank > 0 and not self.training.trainable and not self.lora.pretrained

    @property
    def runs_reference(self) -> bool:
        """True if each step runs the reference forward.

        The start of the run resolves `preference.reference` (run/setup.py). Without `keeps_reference` the data must
        have its log-probabilities.
        """
        compares = self.training.has_reference and self.preference.reference != "stored"
        return (compares or (self.training.objective == GRPO and self.grpo.beta > 0)) and self.keeps_reference

    def _drawing_problems(self) -> list[str]:
        """List the settings that do not suit answers that the model draws itself."""
        training, found = self.training, list[str]()
        name = f"training.objective={training.objective}"
        if not self.draws:
            if self.data.content == PROMPT:
                choices = f"--training.objective {GRPO} or {DISTILL}"
                found.append(f"data.content=prompt: {name} needs texts or answers, not prompts alone; set {choices}")
            return found
        found += self._grpo_problems() if training.objective == GRPO else []
        if training.distills and not self.runs_teacher:
            found.append(
                f"{name} with data.content=prompt: no data hold what a teacher says of answers that the model draws: "
                "name a model with --distillation.teacher"
            )
        if self.rollouts.share < 1 and (training.objective == GRPO or self.rollouts.group_size > 1):
            problem = "a row has one answer: set --rollouts.group-size 1"
            if training.objective == GRPO:
                problem = f"{name} compares answers that the model draws: set it to 1"
            found.append(f"rollouts.share={self.rollouts.share}: {problem}")
        needed = {"training.ema_decay": 0, "training.on_spike": "off", "data.weights": ()}
        needed |= {"checkpoint.replicate_every": 0, "evaluation.samples": 0, "evaluation.tasks": ()}
        return found + self._server_problems() + self._refuse_others(name, needed)

    def _server_problems(self) -> list[str]:
        """List the settings that do not suit answers that a server draws, which gets adapters or all weights."""
        if not self.rollouts.server:
            return []
        name, itself = f"rollouts.server={self.rollouts.server}", "leave it out, so that the run draws its own answers"
        trainable, resized = self.training.trainable, self.model.resize_vocabulary
        refused = {
            "model.pretrained is empty": (not self.model.pretrained, "name the model that the server has"),
            f"training.trainable={trainable} trains some of the weights": (bool(trainable), "set it to ()"),
            f"model.resize_vocabulary={resized} changes their shapes": (resized > 0, "set it to 0"),
        }
        return [
            f"{name}: the server gets the adapters of this run, or all weights, and {problem}: {remedy}, or {itself}"
            for problem, (applies, remedy) in refused.items()
            if applies
        ]

    def _grpo_problems(self) -> list[str]:
        """List the settings that do not suit groups of answers with rewards."""
        name, found = f"training.objective={self.training.objective}", list[str]()
        if self.data.content != PROMPT:
            found.append(f"{name} reads prompts without answers: set --data.content prompt")
        if not self.rollouts.rewards:
            found.append(f"{name} needs a function that rewards answers: name it with --rollouts.rewards FILE:FUNCTION")
        if self.rollouts.group_size < 2:
            found.append(f"rollouts.group_size={self.rollouts.group_size}: {name} compares answers; set at least 2")
        if self.grpo.beta and not self.keeps_reference:
            found.append(
                f"grpo.beta={self.grpo.beta} compares with the model without its adapters, and this run changes it or "
                "begins with others: train new adapters alone (--lora.rank), or set --grpo.beta 0"
            )
        return found

    def _objective_problems(self) -> list[str]:
        """List the settings that `training.objective` does not support."""
        training, found = self.training, self._score_problems() + self._drawing_problems()
        if training.objective == NEXT_TOKEN:
            return found
        name = f"training.objective={training.objective}"
        if self.preference.function and training.objective not in ("dpo", "cpo"):
            found.append(
                f"preference.function={self.preference.function}: it takes the place of the formula of dpo or, without "
                f"a reference, of cpo, and {name}: set --training.objective dpo, or leave the function out"
            )
        if training.has_reference and self.preference.reference == "base" and not self.keeps_reference:
            found.append(
                "preference.reference=base: compares with the model without its adapters, and this run changes it "
                "or begins with others: train new adapters alone (--lora.rank), or set --preference.reference stored"
            )
        if training.distills and not self.runs_teacher and self.distillation.temperature != 1:
            found.append(
                f"distillation.temperature={self.distillation.temperature}: the probabilities that prepare --teacher "
                "keeps are those at temperature 1: set --distillation.temperature 1, or name a model with "
                "--distillation.teacher"
            )
        needed = {"training.z_loss": 0, "model.mtp_layers": 0, "training.local_steps": 1}
        if self.runs_teacher:
            needed["optimizer.in_backward"] = False
        return found + self._refuse_others(name, needed)

    def _score_problems(self) -> list[str]:
        """List the settings that do not fit to the scores of documents, or to a model without them."""
        training, scores, found = self.training, self.model.scores, list[str]()
        name = f"training.objective={training.objective}"
        if scores and not training.reads_scores:
            choices = " or ".join(OF_SCORES if scores == 1 else ["classify"])
            found.append(f"model.scores={scores}: {name} predicts tokens; set --training.objective {choices}")
        if training.reads_scores and not scores:
            remedy = "1" if training.objective == "reward" else "the number of classes, or to 1 for labels on a scale"
            found.append(f"{name}: the model has no scores; set --model.scores to {remedy}")
        if self.data.label_field and not training.reads_scores:
            found.append(f"data.label_field={self.data.label_field}: {name} reads no labels; set --data.label-field ''")
        if training.objective == "reward" and scores > 1:
            found.append(f"model.scores={scores}: a reward is one score; set --model.scores 1")
        if training.objective == "classify" and not self.data.label_field:
            found.append(f"{name}: name the column of the labels with --data.label-field")
        if scores and self.evaluation.samples:
            found.append(
                f"evaluation.samples={self.evaluation.samples}: a model with scores writes no text; set "
                "--evaluation.samples 0"
            )
        if scores and self.evaluation.tasks:
            found.append(
                f"evaluation.tasks={self.evaluation.tasks}: a model with scores answers no tasks; leave it out"
            )
        return found

    def crossing_problems(self) -> list[str]:
        """List the executors that carry only the residual stream from layer to layer, if the model needs more."""
        needs = self._find_others({"model.layer_input_size": 0, "model.shared_key_layers": 0})
        return [
            f"{name} does not support {' and '.join(needs)}, because only the residual stream goes from one "
            f"part of the layers to the next: {remedy}"
            for name, remedy in self._find_others({"mesh.pipeline": 1, "optimizer.in_backward": False}).items()
            if needs
        ]

    def problems(self) -> list[str]:
        """List the errors in each section, and those between sections that need neither the model nor JAX to check."""
        sections = [getattr(self, field.name) for field in fields(self) if field.name != "pipeline"]
        if self.mesh.pipeline > 1:
            sections.append(self.pipeline)
        found = [problem for section in sections for problem in section.problems()]
        found += self._adapter_problems() + self.local_step_problems() + self.crossing_problems()
        found += self._objective_problems()
        every, best, evaluated = self.checkpoint.every, self.checkpoint.keep_best, self.evaluation.every
        if best and evaluated > 0 and every % evaluated:
            found.append(
                f"checkpoint.keep_best={best} compares only steps that are evaluated: make checkpoint.every={every} a "
                f"multiple of evaluation.every={evaluated}"
            )
        if self.evaluation.patience and evaluated and not best:
            found.append(
                f"evaluation.patience={self.evaluation.patience} ends a run some time after its lowest held-out loss: "
                "set --checkpoint.keep-best 1 to keep the checkpoint with that loss"
            )
        if self.checkpoint.replicate_every:
            name = f"checkpoint.replicate_every={self.checkpoint.replicate_every}"
            found += self._refuse_others(name, {"offload.optimizer": False, "offload.parameters": False})
        start, steps = self.profile.start_step, self.training.steps
        if start > steps > 0:
            found.append(f"profile.start_step={start}: must be at most training.steps={steps}")
        if self.training.unroll == "all" and (loops := self.unroll_problems()):
            found.append(f"training.unroll=all does not support {', '.join(loops)}: set --training.unroll none")
        model, length = self.model, self.training.sequence_length
        if model.positions == "learned" and length > model.max_positions:
            remedy = f"set --model.max-positions to at least {length}"
            if model.pretrained:  # the pretrained model determines the size of the table
                remedy = f"set --training.sequence-length to at most {model.max_positions}"
            found.append(
                f"training.sequence_length={length} exceeds model.max_positions={model.max_positions}, the size of the "
                f"table of learned positions: {remedy}"
            )
        return found
