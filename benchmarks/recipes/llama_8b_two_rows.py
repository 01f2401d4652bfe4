"""llama_8b.py with two rows of 8192 tokens a step, over which the update and the casts of weights are spread.

Hardware: one H200. As compiled, XX GiB at the peak, of the 129.7 that it may use. From 79% of the GPU's memory on XLA
computes things again on its own, here 30% more FLOPs, and saves nothing: the option moves that limit.
"""

from pathlib import Path

from jaxopt_llm import config as configuration
from jaxopt_llm.config import TrainConfig


def get_config() -> TrainConfig:
    return configuration.changed(
        configuration.load(str(Path(__file__).with_name("llama_8b.py"))),
        {
            "training.batch_size": 2,
            "xla.options": ("xla_gpu_memory_limit_slop_factor=150",),
        },
    )
