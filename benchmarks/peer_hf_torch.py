"""Run the training step of a recipe in Hugging Face transformers on torch: the peer of `train_step.py --peer hf-torch`.

`work` converts a recipe into the work of the peer; a separate process that runs this file does the work and never
imports JAX. The peer has the same Llama with random values, the same batch, causal attention, AdamW, weight decay and
clipping. It uses its best plain settings: scaled_dot_product_attention, fused AdamW, no key-value cache, and for 16
bits autocast over float32 master weights, as ours. Two differences cost nothing: the learning rate is constant, and the
rows that pad the vocabulary take part in the softmax.
"""

import importlib.util
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxopt_llm.config import Config

MODES = ("eager", "compiled")
Work = dict[str, Any]
# Decoder settings that a Llama does not have.
NOT_LLAMA = (
    *(
        "positions",
        "rope.factor",
        "rope.size",
        "rope.interleaved",
        "norm",
        "norm_placement",
        "norm_zero_centered",
        "qk_norm",
        "biases",
        "mlp",
    ),
    *("attention_scale", "attention_softcap", "logit_softcap", "logit_scale", "embedding_scale", "residual_scale"),
)


def work(config: "Config") -> Work:
    """Return the work of the peer, ready for JSON. Raises InputError for what it cannot do, or not on this machine."""
    from jaxopt_llm.config import ModelConfig
    from jaxopt_llm.config.fields import get_field
    from jaxopt_llm.core.errors import InputError
    from jaxopt_llm.model.decoder_specs import param_specs

    model, training, optimizer = config.model, config.training, config.optimizer
    found = []
    if set(model.pattern) != {"global"}:
        found.append(f"model.pattern={model.pattern}: the peer has only global attention; set --model.pattern global")
    for name in NOT_LLAMA:
        value, plain = get_field(model, name), get_field(ModelConfig(), name)
        if value != plain:
            found.append(f"model.{name}={value}: the peer does not support it; set --model.{name} {plain}")
    if config.mesh.devices > 1:
        found.append(f"the mesh has {config.mesh.devices} devices: the peer runs on one; set every mesh axis to 1")
    if config.precision.reduce_dtype != "float32":
        value = config.precision.reduce_dtype
        found.append(f"precision.reduce_dtype={value}: its gradients are float32; set --precision.reduce-dtype float32")
    if config.precision.compute_dtype == "float16":
        found.append("precision.compute_dtype=float16: no loss scaling here; set --precision.compute-dtype bfloat16")
    if config.lora.rank:
        found.append(f"lora.rank={config.lora.rank}: the peer trains all parameters; set --lora.rank 0")
    found += [
        f"{name} is not installed; run: pip install -e '.[peer]'"
        for name in ("torch", "transformers")
        if importlib.util.find_spec(name) is None
    ]
    if found:
        raise InputError(f"--peer hf-torch: {'; '.join(found)}")
    return {
        "llama": {
            "vocab_size": param_specs(model)["non_layer"]["embedding"]["table"].shape[0],
            "hidden_size": model.width,
            "intermediate_size": model.mlp_width,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "rms_norm_eps": model.norm_epsilon,
            "rope_theta": model.rope.theta,
            "tie_word_embeddings": model.tied_head,
            "max_position_embeddings": training.sequence_length,
        },
        "vocabulary_size": model.vocabulary_size,
        "shape": [training.batch_size, training.sequence_length],
        "accumulation": training.accumulation,
        "autocast": config.precision.compute_dtype == "bfloat16",
        "checkpointing": config.remat.policy == "full",
        "adamw": {
            "lr": optimizer.learning_rate,
            "betas": [optimizer.beta1, optimizer.beta2],
            "eps": optimizer.epsilon,
            "weight_decay": optimizer.weight_decay,
        },
        "clip_norm": optimizer.clip_norm,
    }


def contenders(config: "Config") -> dict[str, tuple[str, list[str], dict[str, str]]]:
    """Return a train_step.Contender for each mode."""
    what = json.dumps(work(config))
    return {mode: (__file__, [mode, what], {}) for mode in MODES}


def make_model(work: Work) -> Any:
    """Return a LlamaForCausalLM with random float32 parameters on the default device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**work["llama"], attn_implementation="sdpa")).train()
    if work["checkpointing"]:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def make_loss(model: Any, work: Work, device: str) -> Callable[[Any, Any], Any]:
    """Return a function (tokens, targets [B, S]) -> mean cross-entropy."""
    import torch

    def loss(tokens: Any, targets: Any) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=work["autocast"]):
            logits = model(input_ids=tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    return loss


def measure(started: float, steps: int, mode: str, work: Work) -> dict[str, Any]:
    """Measure one process: the time from its start to the first step, then each of `steps` steps."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(os.cpu_count() or 1)
    torch.backends.cuda.matmul.allow_tf32 = True  # as in JAX, which multiplies float32 in TF32 on GPUs
    torch.set_default_device(device)
    model = make_model(work)
    loss_of = make_loss(model, work, device)
    if mode == "compiled":
        loss_of = torch.compile(loss_of)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameter for parameter in parameters if parameter.ndim > 1]},
            {"params": [parameter for parameter in parameters if parameter.ndim == 1], "weight_decay": 0.0},
        ],
        **work["adamw"],
        fused=True,
    )
    tokens, targets = (torch.randint(work["vocabulary_size"], work["shape"]) for _ in range(2))

    def step() -> None:
        for microbatch in zip(tokens.chunk(work["accumulation"]), targets.chunk(work["accumulation"]), strict=True):
            (loss_of(*microbatch) / work["accumulation"]).backward()
        torch.nn.utils.clip_grad_norm_(parameters, work["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    try:
        step()
    except torch._dynamo.exc.TorchDynamoException as error:  # no compiler on this machine, or a bug of torch.compile
        return {"unavailable": str(error).strip().splitlines()[0]}
    first_step = time.time() - started

    seconds = []
    for _ in range(steps):
        before = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - before)
    step_seconds = statistics.median(seconds)
    return {
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "parameters": sum(parameter.numel() for parameter in parameters),
        "measured_peak_bytes": torch.cuda.max_memory_allocated()
        if device == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first_step_seconds": first_step,
        "step_seconds": step_seconds,
        "tokens_per_second": tokens.numel() / step_seconds,
    }


if __name__ == "__main__":
    _, _, since, number_of_steps, how, what = sys.argv
    print(json.dumps(measure(float(since), int(number_of_steps), how, json.loads(what))))
