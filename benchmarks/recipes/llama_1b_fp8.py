"""llama_1b.py with its blocks' products in fp8.

Hardware: one H100 or H200. As compiled for an H200, 46.4 GiB at the peak.
"""

from pathlib import Path

from jaxopt_llm import config as configuration
from jaxopt_llm.config import TrainConfig


def get_config() -> TrainConfig:
    return configuration.changed(
        configuration.load(str(Path(__file__).with_name("llama_1b.py"))),
        {
            "precision.matmul": "fp8",
        },
    )
