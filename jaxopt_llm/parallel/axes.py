"""Tables of the logical axes that layers name: the mesh axes that divide each, for parameters and for activations."""

from jaxopt_llm.config import AXES, BATCH_AXES

PARAMETER_AXES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("virtual", "layers", "positions", "embed", "latent", "head_dim", "taps"), ()),
    "stages": ("pipeline",),
    "groups": ("data",),  # of state that each group of devices has for itself (step/local_steps.py)
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "expert_mlp": ("tensor",),
    "vocabulary": ("pipeline", "tensor"),
    "tensor": ("tensor",),  # of a user's model: a dimension that its rules give to `tensor`
}
ACTIVATION_AXES: dict[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "sequence": ("context",),
    "residual_sequence": ("context",),  # the sequence of the residual stream and its norms
    "sent_sequence": ("context", "tensor"),  # the same, on its way from one pipeline stage to another
    **dict.fromkeys(("embed", "head_dim"), ()),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocabulary": ("tensor",),
    # Rows of experts, [devices, rows, ...]: each device has an array of its own, whose rows no table can count
    # (model/moe/exchange.py), and in which its part of the experts' matrices makes its part of the hidden dimension.
    "devices": AXES,
    "expert_rows": (),
    "expert_mlp": ("tensor",),
}
SEQUENCE_PARALLEL_AXES = {"residual_sequence": ("context", "tensor")}  # replaces entries if sharding.sequence_parallel
# Logical axes that are replicated, by intent, where they are smaller than the number of devices that would split them:
# with fewer key-value heads than `tensor`, each device computes the heads that its queries read.
REPLICATED_WHEN_SMALLER = ("kv_heads",)
# Logical axes that the stages of a pipeline divide in addition to `tensor`. If stages × `tensor` does not divide the
# size, only `tensor` does, by intent.
SPLIT_OVER_STAGES = ("vocabulary",)
# Logical axes of a stack of layers. They come first and ZeRO never divides them. Most stacks have only the last one. In
# a pipeline, parameters rest by stage, and the last axis is the slot within the stage. Loops run over the last axis.
LOOPED_AXES = ("virtual", "stages", "layers")
STORAGE_AXES = ("fsdp", "context", "expert")  # ZeRO divides state by the product of their sizes
