"""llama_8b.py with two rows of 8192 tokens a step, over which the update and the casts of weights are spread.

Hardware: one H200. As compiled, 125.3 GiB at the peak, of 129.7 that XLA may use. Without its option it would compute
things again on its own, 30% more FLOPs (see parallel/xla_options.py).
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
