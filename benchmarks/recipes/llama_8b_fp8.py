"""llama_8b.py with its blocks' products in fp8.

Hardware: one H200. As compiled, 101.9 GiB at the peak.
"""

from pathlib import Path

from jaxopt_llm import config as configuration
from jaxopt_llm.config import TrainConfig


def get_config() -> TrainConfig:
    return configuration.changed(
        configuration.load(str(Path(__file__).with_name("llama_8b.py"))),
        {
            "precision.matmul": "fp8",
        },
    )
