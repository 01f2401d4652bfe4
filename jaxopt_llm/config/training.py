"""Settings of training: batches, optimizer, learning rate schedule, adapters and evaluation."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, get_args

from jaxopt_llm.config.data import PREFERENCE, UNPAIRED, Pairs
from jaxopt_llm.config.metadata import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, SHARE, Bounds, Section, setting

Unroll = Literal["auto", "all", "none"]
MIN_LOSS_CHUNK = 1024  # tokens of training.loss_chunk=auto


def choose_accumulation(rows: int, most: int, least: int) -> int:
    """Return the smallest number of microbatches with which a device has at most `most` of its rows at a time.

    It divides the rows, and is not below `least`, if there is such a number.
    """
    counts = range(max(least, 1), rows + 1)
    return next((count for count in counts if rows % count == 0 and rows // count <= most), rows)


NEXT_TOKEN, DISTILL, CLASSIFY, KTO, GRPO = "next_token", "distill", "classify", "kto", "grpo"
Objective = Literal[
    "next_token", "distill", "dpo", "ipo", "hinge", "cpo", "simpo", "orpo", "kto", "reward", "classify", "grpo"
]
WITH_REFERENCE = ("dpo", "ipo", "hinge", KTO)
OF_SCORES = ("reward", CLASSIFY)  # they read the scores of documents (model.scores)
OVER_PAIRS = tuple(name for name in get_args(Objective) if name not in (NEXT_TOKEN, DISTILL, CLASSIFY, KTO, GRPO))


@dataclass(frozen=True)
class TrainingConfig(Section, path="training"):
    steps: int = setting(1000, resume="freely", bounds=NON_NEGATIVE)
    """Number of optimizer steps of the whole run (Hugging Face: max_steps). 0 = as training.epochs says."""
    epochs: float = setting(0.0, resume="freely", bounds=NON_NEGATIVE)
    """Passes over the training rows of all data.paths together, in place of training.steps (Hugging Face:
    num_train_epochs). The start of the run resolves them to training.steps in config.json. A flag of one of the two
    sets the other to 0. 0 = as training.steps says."""
    objective: Objective = setting("next_token")
    """What is learned. next_token: the next token of each document. distill: the probabilities of another model for
    each next token: of distillation.teacher, or as prepare --teacher has kept them; with data.content=prompt, in
    answers that the model draws itself (docs/distillation.md). classify: the label of each document
    (data.label_field), by its scores (model.scores, docs/rewards.md). kto (Ethayarajh et al. 2024): answers that are
    judged one by one, data.content=unpaired (docs/preferences.md). grpo: answers that the model draws itself, and that
    functions of the user reward (rollouts.rewards, docs/grpo.md). The others prefer the chosen answer of a pair to the
    rejected one, and read data.content=preference. dpo (Rafailov et al. 2023), ipo (Azar et
    al. 2023) and hinge (SLiC-HF, Zhao et al. 2023) compare with a reference: the model of prepare --reference, or the
    model without its adapters; cpo (Xu et al. 2024), simpo (Meng et al. 2024) and orpo (Hong et al. 2024) need none;
    reward gives the chosen answer a larger score (Bradley-Terry; docs/rewards.md)."""
    batch_size: int = setting(32, bounds=AT_LEAST_ONE)
    """Sequences per step, over all devices and microbatches (global batch size)."""
    sequence_length: int = setting(256, bounds=AT_LEAST_ONE)
    """Tokens per sequence."""
    accumulation: int = setting(1, resume="freely", in_backward=1, bounds=AT_LEAST_ONE)
    """Microbatches per step, each of batch_size / accumulation sequences (gradient accumulation; DeepSpeed and Hugging
    Face: gradient_accumulation_steps). With mesh.fsdp auto, that of a recipe follows the devices and the batch size of
    the command line: a device has no more sequences at a time than the recipe says."""
    local_steps: int = setting(
        1,
        bounds=AT_LEAST_ONE,
        search=(1, 20),
        search_rank=8,
        price="each replica trains by itself between outer steps, which changes what is learnt",
    )
    """Steps that each index of mesh.data trains by itself, with its own moments, before an outer step averages what
    changed (DiLoCo, Douillard et al. 2023). For links so slow that gradients cannot be summed in every step. 1 = sum
    the gradients of all devices in every step."""
    loss_chunk: int | Literal["auto"] = setting("auto", resume="freely", bounds=NON_NEGATIVE)
    """Tokens of each device whose logits exist at the same time (chunked cross-entropy). Larger chunks read the head's
    weights less often. 0 = all tokens of the microbatch. auto: on GPUs the largest power of two, from 1024 to 8192,
    that does not raise the peak of memory; 1024 on CPUs. Resolved like remat.policy."""
    unroll: Unroll = setting("auto", resume="freely")
    """Unrolling of the loop over the layers. none: one loop, which copies what the backward needs into stacks and back.
    all: no loop and no stacks, at the price of a longer compilation and more memory; requires remat.policy none and one
    stage. auto: all on GPUs if the memory suffices and the run is longer than 10 minutes, otherwise none. Resolved like
    remat.policy."""
    attention: Literal["auto", "xla", "cudnn", "pallas", "triton"] = setting(
        "auto",
        resume="freely",
        search=("cudnn", "pallas", "triton"),
        search_rank=0,
        price="none: faster than xla (measured on Hopper); GPUs from Ampere on (pallas) or Hopper on (the others)",
    )
    """Implementation of attention. xla: XLA's operations, on any device. cudnn: NVIDIA's kernel, for GPUs from Hopper
    on, and from Ampere on with data.documents_per_row=1. pallas: our flash attention kernel in Pallas, for GPUs from
    Ampere on. triton: our flash attention kernel in Triton, for Hopper and Blackwell. auto: of those that support the
    model, the data and the GPU, the fastest as measured on this GPU; without a measurement the first of cudnn, triton
    and pallas (Hopper, Blackwell) or of pallas and cudnn (Ampere). The start of the run resolves it in config.json, and
    a resumed run keeps it on the same GPUs. Attention that reads a KV cache always uses xla."""
    grouped_matmul: Literal["auto", "xla", "pallas"] = setting("auto", resume="freely")
    """Implementation of the experts' grouped matmul. xla: XLA's operation, which on GPUs multiplies each row with the
    matrices of all experts. pallas: our kernel in Pallas, for GPUs from Ampere on. auto: pallas on such GPUs, otherwise
    xla."""
    z_loss: float = setting(0.0, bounds=NON_NEGATIVE)
    """Weight of the z-loss: log(Z)² per token, where Z is the denominator of the softmax over the vocabulary. It keeps
    logits from drifting (PaLM, Chowdhery et al. 2022, uses 1e-4). The loss in the metrics excludes it. 0 = off."""
    mtp_weight: float = setting(0.3, bounds=POSITIVE)
    """With model.mtp_layers: weight of the mean loss of the MTP modules (DeepSeek-V3: 0.3 for the first 10 of 14.8
    trillion tokens, then 0.1). The loss in the metrics excludes it; mtp_loss is that of the modules."""
    skip_outliers: float = setting(0.0, in_backward=0)
    """Skip a step whose gradient norm is above this many times the median of the last 128 steps that were not skipped.
    0 = off. Steps that are not finite are always skipped."""
    on_spike: Literal["off", "skip", "rollback"] = setting("off", in_backward="off")
    """What follows a spike: a loss above the limit of training.spike_factor, or a gradient norm above that of
    training.skip_outliers. skip: the step changes nothing. rollback: the run goes back to its last checkpoint, and
    leaves out the batches from there up to this one. Without a checkpoint it skips. off: losses have no limit."""
    spike_factor: float = setting(2.0, in_backward=2.0, bounds=Bounds(above=1))
    """With training.on_spike, the largest loss of a step, as a multiple of the median of the last 128 steps that were
    not skipped."""
    ema_decay: float = setting(0.0, resume="never", bounds=SHARE)
    """Decay per step of an exponential moving average of the trained parameters, such as 0.999. It is at most
    (1 + n) / (10 + n) in update n, so that the initial values do not dominate it. Held-out losses, samples, generation
    and exports use the average. It takes 4 bytes per trained parameter, divided as the optimizer's state. 0 = off."""
    trainable: tuple[str, ...] = setting((), resume="never")
    """Parameters to train, such as embedding head for the two tables: parts of their paths, or globs of the paths such
    as segment_1/*, where * also matches slashes; the others are frozen, in precision.compute_dtype. With lora.rank,
    these parameters train in addition to the adapters (PEFT: modules_to_save). Empty = all parameters, or with
    lora.rank only the adapters."""

    @property
    def logit_tokens(self) -> int:
        """Tokens of `loss_chunk`, and of the smallest chunk while it is not resolved."""
        return MIN_LOSS_CHUNK if isinstance(self.loss_chunk, str) else self.loss_chunk

    @property
    def pairs(self) -> Pairs:
        """Kind of the pairs of documents that the objective reads; empty for single documents."""
        return UNPAIRED if self.objective == KTO else PREFERENCE if self.objective in OVER_PAIRS else ""

    @property
    def reads_scores(self) -> bool:
        """True if the objective reads the scores of documents, and no log-probabilities of tokens."""
        return self.objective in OF_SCORES

    @property
    def distills(self) -> bool:
        """True if the objective compares with the probabilities of a teacher."""
        return self.objective == DISTILL

    @property
    def has_reference(self) -> bool:
        """True if the objective compares with a reference model whose scores the data may hold."""
        return self.objective in WITH_REFERENCE

    @property
    def spike_limit(self) -> float:
        """`spike_factor` if spikes are looked for, else 0."""
        return 0.0 if self.on_spike == "off" else self.spike_factor

    def problems(self) -> list[str]:
        found = self.find_out_of_range()
        if self.steps and self.epochs:
            found.append(f"training.steps={self.steps} and training.epochs={self.epochs}: set one of them to 0")
        if not self.steps and not self.epochs:
            found.append("training.steps=0 and training.epochs=0: give one of them")
        if self.skip_outliers and not self.skip_outliers > 1:
            found.append(f"training.skip_outliers={self.skip_outliers}: must be above 1, or 0 to skip no outliers")
        return found


StateDtype = Literal["float32", "bfloat16", "int8"]


def parse_group(group: str) -> tuple[str, float]:
    """Return the pattern and the number of a parameter group, such as "*/attention/*=0.5".

    Raises:
        ValueError: the text is not PATTERN=NUMBER.
    """
    pattern, _, value = group.rpartition("=")
    if not pattern:
        raise ValueError
    return pattern, float(value)


def find_group_problems(name: str, groups: Sequence[str]) -> list[str]:
    """List the syntax errors of parameter groups. name: dotted name of the setting, for the messages."""

    def is_wrong(group: str) -> bool:
        try:
            return not 0 <= parse_group(group)[1] < math.inf
        except ValueError:
            return True

    form = "must be PATTERN=NUMBER with a number of at least 0, as in */mlp/*=0.5"
    return [f"{name}: {group}: {form}" for group in groups if is_wrong(group)]


@dataclass(frozen=True)
class OptimizerConfig(Section, path="optimizer"):
    learning_rate: float = setting(3e-4, bounds=POSITIVE)
    """Peak learning rate of the schedule. With adafactor it is relative to the RMS of each weight."""
    beta1: float = setting(0.9, bounds=SHARE)
    """adamw: decay of the first moment per step. lion: share of the momentum in the direction of a step."""
    beta2: float = setting(0.95, bounds=SHARE)
    """adamw: decay of the second moment per step. lion: decay of the momentum per step."""
    epsilon: float = setting(1e-8, bounds=POSITIVE)
    """adamw: value added to the square root of the second moment (eps)."""
    weight_decay: float = setting(0.1, bounds=NON_NEGATIVE)
    """Decoupled weight decay: each step subtracts learning rate × this × the parameter (AdamW, Loshchilov & Hutter
    2019). decay_groups selects the parameters."""
    clip_norm: float = setting(1.0, in_backward=0, bounds=NON_NEGATIVE)
    """Maximum global norm of the gradient; a gradient with a larger norm is scaled down to it (max_grad_norm). 0 =
    off."""
    in_backward: bool = setting(
        False, resume="freely", search=(False, True), search_rank=4, price="no clipping, accumulation or skipped steps"
    )
    """Update each layer as soon as the backward pass has its gradient, then free the gradient, so that all gradients
    never exist at once (LOMO; torchtune: optimizer_in_bwd). Not available with clipping, accumulation, loss scaling,
    skipped steps or a pipeline."""
    name: Literal["adamw", "sgd", "lion", "adafactor", "muon"] = setting("adamw", resume="never")
    """Optimizer. With muon, only the matrices of the blocks use it; the other parameters use adamw."""
    state_dtype: StateDtype = setting(
        "float32", resume="never", search=("float32", "bfloat16", "int8"), search_rank=1, price="rounded moments"
    )
    """Dtype of the stored moments of matrices and tables, for all optimizers except adafactor: 8, 4 or 2.06 bytes per
    parameter for adamw. int8 stores codes in blocks along the last dimension, each with a scale (8-bit optimizer)."""
    momentum: float = setting(0.95, bounds=SHARE)
    """sgd, and muon for its matrices: decay of the momentum per step."""
    outer_learning_rate: float = setting(1.0, bounds=POSITIVE)
    """With training.local_steps: factor of the mean change of the replicas in an outer step. DiLoCo's authors use 0.7
    with outer_momentum 0.9, for rounds of 500 steps."""
    outer_momentum: float = setting(0.0, bounds=SHARE)
    """With training.local_steps: decay of the Nesterov momentum per outer step. 0 = the plain mean of the replicas."""
    decay_groups: tuple[str, ...] = ()
    """Factors of weight_decay by parameter, each PATTERN=NUMBER, such as "*norm/*=0" "*=1". Patterns are globs of
    paths, where * also matches slashes, and the first match applies. Every trained parameter must match a pattern, and
    every pattern must apply to a parameter. Empty = 1 for matrices and tables, 0 for norm scales and biases."""
    rate_groups: tuple[str, ...] = ("*=1",)
    """Factors of the learning rate by parameter, in the syntax of decay_groups."""

    def problems(self) -> list[str]:
        found = self.find_out_of_range()
        if self.name == "adafactor" and self.state_dtype != "float32":
            found.append(
                f"optimizer.state_dtype={self.state_dtype} is not supported with optimizer.name=adafactor, whose "
                "moments are small: set --optimizer.state-dtype float32"
            )
        if not self.rate_groups:
            found.append('optimizer.rate_groups is empty: give at least "*=1"')
        for name in ("decay_groups", "rate_groups"):
            found += find_group_problems(f"optimizer.{name}", getattr(self, name))
        return found


@dataclass(frozen=True)
class ScheduleConfig(Section, path="schedule"):
    warmup_steps: int | float = setting(100, bounds=NON_NEGATIVE)
    """Steps over which the learning rate rises to the peak. A number below 1 is a share of decay_steps (by default the
    steps of the run), rounded up (Hugging Face: warmup_steps, warmup_ratio)."""
    decay_steps: int = setting(0, bounds=NON_NEGATIVE)
    """Step at which cosine, linear and wsd reach their final learning rate. It is separate from training.steps, so that
    a run can be extended. 0 = training.steps at the first start of the run, or the end of the warm-up if that is
    later."""
    final_share: float = setting(0.1, bounds=Bounds(minimum=0, maximum=1))
    """Final learning rate as a share of the peak. inverse_sqrt does not fall below it; constant does not use it."""
    kind: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = "cosine"
    """Shape of the schedule after the warm-up (Hugging Face: lr_scheduler_type). wsd stays at the peak and falls
    linearly in the last cooldown_steps (warmup-stable-decay, Hu et al. 2024)."""
    cooldown_steps: int = setting(100, bounds=AT_LEAST_ONE)
    """wsd: number of steps of the final fall, which ends at decay_steps."""
    warmup_kind: Literal["linear", "log"] = "linear"
    """Shape of the warm-up. linear: a straight line. log: by the logarithm of the step, fast at first (DeepSpeed:
    warmup_type)."""
    initial_share: float = setting(0.0, bounds=Bounds(minimum=0, maximum=1))
    """Learning rate at which the warm-up begins, as a share of the peak (DeepSpeed: warmup_min_lr / warmup_max_lr)."""

    @property
    def end_step(self) -> int | None:
        """First step with the final learning rate; None if the schedule has no end."""
        return self.decay_steps if self.kind in ("cosine", "linear", "wsd") else None

    def describe_warmup(self, steps: int) -> str:
        """Return the setting of the warm-up with its value, and its steps if it is a share."""
        return f"schedule.warmup_steps={self.warmup_steps}" + f" ({self.count_warmup(steps)} steps)" * self._is_share

    def count_warmup(self, steps: int) -> int:
        """Return the steps of the warm-up in a run of so many steps."""
        return self._share_of(self.choose_end(steps)) if self._is_share else int(self.warmup_steps)

    def choose_end(self, steps: int) -> int:
        """Return `decay_steps`, or the step that 0 stands for in a run of so many steps."""
        if self.decay_steps:
            return self.decay_steps
        fall = self.cooldown_steps if self.kind == "wsd" else 1
        if not self._is_share:
            return max(steps, int(self.warmup_steps) + fall)
        # The smallest end that has room for the warm-up and the fall.
        end = math.floor(fall / (1 - self.warmup_steps))
        while end - self._share_of(end) < fall:
            end += 1
        return max(steps, end)

    @property
    def _is_share(self) -> bool:
        return 0 < self.warmup_steps < 1

    def _share_of(self, end: int) -> int:
        return math.ceil(self.warmup_steps * end - 1e-9)  # 0.07 * 100 is above 7 in floating point

    def problems(self) -> list[str]:
        found, end = self.find_out_of_range(), self.decay_steps
        if self.warmup_steps > 1 and self.warmup_steps % 1:
            found.append(f"schedule.warmup_steps={self.warmup_steps}: must be whole, or a share below 1")
        if found or not end:  # it will be after the warm-up: see `choose_end`
            return found
        warmup = self.count_warmup(end)
        if self.end_step is not None and warmup >= end:
            found.append(f"{self.describe_warmup(end)}: must be below schedule.decay_steps={end}")
        elif self.kind == "wsd" and self.cooldown_steps > end - warmup:
            found.append(
                f"schedule.cooldown_steps={self.cooldown_steps}: must be at most {end - warmup}, the steps from "
                "the end of schedule.warmup_steps to schedule.decay_steps"
            )
        return found


ALL_LINEAR = "all-linear"  # a target that is not a glob: PEFT's name for all matrices of the blocks


@dataclass(frozen=True)
class PreferenceConfig(Section, path="preference"):
    reference: Literal["auto", "stored", "base"] = "auto"
    """What dpo, ipo, hinge and kto compare with. stored: the log-probabilities of prepare --reference in the data.
    base: the model without its adapters, in a forward of each step. auto: stored if the data have them. The start of
    the run resolves it in config.json."""
    function: str = setting("", resume="freely", is_place=True)
    """With training.objective dpo, or cpo without a reference: a function of the recipe in place of the formula,
    FILE:FUNCTION (docs/preferences.md). A resume needs the same source; the path may change."""
    beta: float = setting(0.1, bounds=POSITIVE)
    """Strength of the preference (TRL: beta). simpo wants about 2."""
    label_smoothing: float = setting(0.0, bounds=SHARE)
    """Share of pairs whose answers are taken to be exchanged (conservative DPO; TRL: label_smoothing)."""
    margin: float = setting(0.0, bounds=NON_NEGATIVE)
    """Margin of simpo (TRL: simpo_gamma), and of reward for rows without a margin of their own (data.label_field)."""
    nll_weight: float = setting(0.0, bounds=NON_NEGATIVE)
    """Weight of the mean cross-entropy of a chosen answer's tokens, added to the loss of its pair (Pang et al. 2024;
    TRL: cpo_alpha)."""
    center_weight: float = setting(0.0, bounds=NON_NEGATIVE)
    """reward: weight of the square of the sum of the two scores of a pair, so that scores stay near 0 (Eisenstein et
    al. 2023; TRL: center_rewards_coefficient)."""
    desirable_weight: float = setting(1.0, bounds=POSITIVE)
    """kto: weight of the losses of desirable answers (TRL: desirable_weight). The authors choose the two weights so
    that those of all desirable answers sum to 1 to 1.33 times those of all undesirable ones, or to as much less."""
    undesirable_weight: float = setting(1.0, bounds=POSITIVE)
    """kto: weight of the losses of undesirable answers (TRL: undesirable_weight)."""

    def problems(self) -> list[str]:
        """List the errors in these settings."""
        found = self.find_out_of_range()
        if self.function and not all(self.function.rpartition(":")[::2]):
            found.append(f"preference.function={self.function}: must be FILE:FUNCTION, as in losses.py:apo_zero")
        return found


@dataclass(frozen=True)
class DistillationConfig(Section, path="distillation"):
    teacher: str = setting("", resume="freely", is_place=True)
    """With training.objective distill: Hugging Face folder or hub id of the model to learn from. Its tokenizer must
    give the ids of data.tokenizer. A resume needs the same weights; their path may change. Empty = the data hold what a
    teacher says of them (prepare --teacher)."""
    teacher_base: Literal["float", "int8", "nf4"] = "float"
    """Storage of the teacher's weights, as lora.base has it for a frozen base. float: precision.compute_dtype. int8:
    the matrices of the blocks as int8 codes. nf4: the matrices of the blocks as 4-bit NormalFloat."""
    beta: float = setting(0.5, bounds=Bounds(minimum=0, maximum=1))
    """Divergence (TRL: beta). 0: the forward KL divergence, KL(teacher || student). 1: the reverse one, KL(student ||
    teacher). Between: the generalised Jensen-Shannon divergence (Agarwal et al. 2023)."""
    temperature: float = setting(1.0, bounds=POSITIVE)
    """Number by which the logits of both models are divided for the divergence (TRL: temperature)."""
    next_token_weight: float = setting(0.0, bounds=NON_NEGATIVE)
    """Weight of the cross-entropy of the next token, added to the divergence."""


@dataclass(frozen=True)
class RolloutsConfig(Section, path="rollouts"):
    prompts: int = setting(16, bounds=AT_LEAST_ONE)
    """Prompts of a step. Their answers are packed into training.batch_size rows, which must hold the longest ones."""
    group_size: int = setting(8, bounds=AT_LEAST_ONE)
    """Answers that are drawn for each prompt (TRL: num_generations). grpo compares them with each other."""
    share: float = setting(1.0, bounds=Bounds(above=0, maximum=1))
    """distill: share of prompts that the model answers itself (GKD, Agarwal et al. 2023; TRL: lmbda). The others have
    the answer of the column completion of their row."""
    max_new_tokens: int = setting(256, bounds=AT_LEAST_ONE)
    """Maximum number of tokens of an answer (TRL: max_completion_length, of GKD max_new_tokens)."""
    updates: int = setting(1, bounds=AT_LEAST_ONE)
    """Steps that train on the same answers, before new ones are drawn (TRL: num_iterations)."""
    rewards: tuple[str, ...] = setting((), resume="freely", is_place=True)
    """Functions that reward answers, each FILE:FUNCTION (TRL: reward_funcs, with the same arguments: docs/grpo.md). The
    reward of an answer is the sum of what they return. grpo learns from it, and a resume needs the same source; of
    distill it is only recorded."""
    reward_seconds: float = setting(60.0, resume="freely", bounds=POSITIVE)
    """Time limit of the rewards of a step, in seconds. A run whose functions take longer ends with exit code 2."""

    server: str = setting("", resume="freely", is_place=True)
    """Server with OpenAI's API that draws the answers, such as http://127.0.0.1:8000/v1: vLLM or jaxopt-llm
    serve (TRL: vllm_server_base_url; docs/grpo.md). It serves the model of model.pretrained, and gets the adapters of
    the run, or all its weights, whenever they have changed. Empty = the run draws them itself."""
    server_seconds: float = setting(600.0, resume="freely", bounds=POSITIVE)
    """Time limit of each request to the server, in seconds. A run whose server takes longer ends with exit code 74."""
    server_tolerance: float = setting(0.0, resume="freely", bounds=NON_NEGATIVE)
    """Largest difference between the log-probabilities that server and run give the tokens of a probe, in nats, mean
    over the tokens. Above it the run ends with exit code 2. 0 = four times what was measured at the start, from 0.03 to
    0.25, or 0.001 if both compute in float32 (docs/grpo.md). A server with weights in 8 or 4 bits may need more."""

    def problems(self) -> list[str]:
        wrong = [each for each in self.rewards if not all(each.rpartition(":")[::2])]
        found = self.find_out_of_range()
        found += [f"rollouts.rewards: {each}: must be FILE:FUNCTION, as in rewards.py:is_right" for each in wrong]
        if self.server and not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", self.server):
            found.append(f"rollouts.server={self.server}: must be an address such as http://127.0.0.1:8000/v1")
        return found


@dataclass(frozen=True)
class GrpoConfig(Section, path="grpo"):
    scale_advantages: Literal["std", "none"] = "std"
    """Divisor of a reward minus the mean of its group. std: the standard deviation of the group (GRPO, Shao et al.
    2024). none: 1 (Dr. GRPO, Liu et al. 2025)."""
    normalisation: Literal["token", "sequence", "constant"] = "token"
    """Mean of the loss (TRL: loss_type). token: over the tokens of all answers (DAPO, Yu et al. 2025). sequence: over
    the tokens of each answer, then over answers (GRPO). constant: the sum over tokens, divided by
    rollouts.max_new_tokens and by the number of answers (Dr. GRPO)."""
    level: Literal["token", "sequence"] = "token"
    """Ratio of probabilities of the model and of the sampler. token: of each token. sequence: the geometric mean over
    the tokens of an answer, with much smaller epsilons, such as 3e-4 and 4e-4 (GSPO, Zheng et al. 2025)."""
    epsilon: float = setting(0.2, bounds=SHARE)
    """The gain from ratios below 1 - epsilon is clipped (TRL: epsilon)."""
    epsilon_high: float = setting(0.28, bounds=POSITIVE)
    """The gain from ratios above 1 + epsilon_high is clipped (DAPO: clip higher)."""
    max_ratio: float = setting(3.0, bounds=Bounds(above=1))
    """Largest ratio: it truncates the importance weights of tokens that the sampler thought unlikely (TRL: delta; dual
    clip, Ye et al. 2020)."""
    beta: float = setting(0.0, bounds=NON_NEGATIVE)
    """Weight of the KL divergence from the model without its adapters (TRL: beta). 0 = no reference."""

    def problems(self) -> list[str]:
        found = self.find_out_of_range()
        if self.max_ratio <= 1 + self.epsilon_high:
            found.append(f"grpo.max_ratio={self.max_ratio}: must be above 1 + grpo.epsilon_high={self.epsilon_high}")
        return found


@dataclass(frozen=True)
class LoraConfig(Section, path="lora"):
    pretrained: str = setting("", resume="freely", is_place=True)
    """Folder or hub id of a PEFT adapter of this model, from which the adapters start. It also sets rank, alpha,
    targets, rslora and dora; and with whole weights (modules_to_save) training.trainable and the size of the
    vocabulary. Empty = new adapters."""
    rank: int = setting(0, resume="never", in_pretrained=True, bounds=NON_NEGATIVE)
    """Rank of the LoRA adapters; only they are trained (Hu et al. 2021; PEFT: r). 0 = no adapters: train the parameters
    themselves."""
    alpha: float = setting(16.0, in_pretrained=True, bounds=POSITIVE)
    """The product of an adapter is multiplied by alpha / rank (PEFT: lora_alpha)."""
    targets: tuple[str, ...] = setting((ALL_LINEAR,), resume="never", in_pretrained=True)
    """Weights that get adapters (PEFT: target_modules): all-linear for the matrices of the blocks, parts of paths such
    as query value, or globs of paths such as */attention/*, where * also matches slashes. The first match applies, and
    every pattern must apply to a weight."""
    base: Literal["float", "int8", "nf4"] = setting("float", resume="never")
    """Storage of the frozen base. float: precision.compute_dtype. int8: the matrices of the blocks as int8 codes. nf4:
    the matrices of the blocks as 4-bit NormalFloat (QLoRA, Dettmers et al. 2023)."""
    double_quantisation: bool = setting(False, resume="never")
    """With base=nf4: quantise the scales of the blocks to 8 bits too, which takes 4.1 bits per weight instead of 4.5
    (bitsandbytes: bnb_4bit_use_double_quant)."""
    rslora: bool = setting(False, in_pretrained=True)
    """Multiply the product of an adapter by alpha / √rank instead, so that its size does not depend on the rank
    (rsLoRA, Kalajdzievski 2023; PEFT: use_rslora)."""
    dora: bool = setting(False, resume="never", in_pretrained=True)
    """Train the norm of each output channel of a weight separately from its direction (DoRA, Liu et al. 2024; PEFT:
    use_dora)."""
    dropout: float = setting(0.0, bounds=SHARE)
    """Dropout rate of the input of each adapter in the blocks (PEFT: lora_dropout). 0 = off."""

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def problems(self) -> list[str]:
        found = self.find_out_of_range()
        if self.rank > 0 and not self.targets:
            found.append(f"lora.targets is empty: give {ALL_LINEAR} or at least one pattern")
        return found + [
            f"lora.{name}={getattr(self, name)} has no effect with {reason}, or leave out --lora.{name}"
            for name, reason in self.find_unread().items()
        ]

    def find_unread(self) -> dict[str, str]:
        """Return the fields with another value than the default that are not read: why, and what would read them."""
        found = {}
        if self.base != "nf4":
            found["double_quantisation"] = f"lora.base={self.base}: set --lora.base nf4"
        if self.rank == 0 and not self.pretrained:
            reason = "lora.rank=0, which trains no adapters: set --lora.rank"
            names = ("alpha", "targets", "base", "rslora", "dora", "dropout")
            found |= dict.fromkeys(names, reason)
        return {name: reason for name, reason in found.items() if getattr(self, name) != getattr(LoraConfig, name)}


@dataclass(frozen=True)
class EvaluationConfig(Section, path="evaluation"):
    every: int = setting(200, bounds=NON_NEGATIVE)
    """Steps between two evaluations of the held-out loss (eval_steps). The last step is evaluated too. 0 = no
    evaluations at all (eval_strategy: no); without evaluation.paths, the run then also trains on the documents of
    data.held_out. A resume cannot change between 0 and a number unless run.allow_change names it."""
    patience: int = setting(0, bounds=NON_NEGATIVE)
    """Early stopping: evaluations without a new lowest held-out loss that end the run (early_stopping_patience). It
    ends as after its last step, with a checkpoint, and checkpoint.keep_best keeps the one with the lowest loss. Started
    again, the run goes on only with a larger number or with 0. 0 = off."""
    batches: int = setting(16, bounds=AT_LEAST_ONE)
    """Maximum number of batches per evaluation and validation set, each of training.batch_size sequences."""
    paths: tuple[str, ...] = setting((), resume="if_allowed")
    """Validation sets, each NAME=PATH or PATH: a file, folder or glob that is read as data.* describes. The name of a
    PATH alone is its last part without suffix. All documents of data.paths are then trained on. The metrics hold the
    loss of each set, eval_loss/NAME, and of all sets together, eval_loss. Empty = data.held_out of the documents."""
    samples: int = setting(0, bounds=NON_NEGATIVE)
    """Number of documents of each validation set whose text the model continues at each evaluation, or whose question
    it answers if they are conversations. The prompts are the same each time, and samples.jsonl in the run directory
    records the texts. 0 = none."""
    sample_tokens: int = setting(64, bounds=AT_LEAST_ONE)
    """Maximum number of tokens of a sample; at most half of training.sequence_length."""

    tasks: tuple[str, ...] = ()
    """Tasks of EleutherAI's lm-evaluation-harness on which each evaluation evaluates the model (docs/evaluation.md):
    names of tasks, groups and tags, with wildcards. Prompts are conversations unless data.content is text. The metrics
    are recorded as eval_tasks/TASK/METRIC, and the results are written to evaluations/ in the run directory."""
    task_limit: float = setting(0.0, bounds=NON_NEGATIVE)
    """Number of documents of each task that are read, or their share if it is below 1. 0 = all."""
    task_folder: str = ""
    """Folder with YAML files of further tasks."""

    def problems(self) -> list[str]:
        found = self.find_out_of_range()
        if self.task_limit > 1 and self.task_limit % 1:
            found.append(f"evaluation.task_limit={self.task_limit}: must be a whole number, or a share below 1")
        names = [name for name, _ in self.named_paths()]
        for text, name in zip(self.paths, names, strict=True):
            if not name:
                found.append(f"evaluation.paths: {text}: give this validation set a name: NAME={text}")
            elif names.count(name) > 1:
                found.append(
                    f"evaluation.paths: {text}: another set is named {name} too; write NAME=PATH with a new name"
                )
        return found

    @property
    def holds_out(self) -> bool:
        """True if data.held_out of the documents are held out, to measure their loss, and not trained on."""
        return self.every > 0 and not self.paths

    def named_paths(self) -> list[tuple[str, str]]:
        """Return the name and the path of each validation set. The name is empty if there is none to derive."""
        return [_split_name(text) for text in self.paths]


def _split_name(text: str) -> tuple[str, str]:
    if given := re.fullmatch(r"([\w.-]+)=(.+)", text):
        return given[1], given[2]
    name = PurePath(text).name.split(".")[0]
    return (name if re.fullmatch(r"[\w-]+", name) else ""), text
