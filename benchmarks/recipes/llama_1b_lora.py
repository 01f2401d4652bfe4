"""Adapters over llama_1b.py, its base in bf16.

Hardware: one GPU of 80 GB. As compiled for an H200, 31.6 GiB at the peak.
"""

from pathlib import Path

from jaxopt_llm import config as configuration
from jaxopt_llm.config import TrainConfig


def get_config() -> TrainConfig:
    return configuration.changed(
        configuration.load(str(Path(__file__).with_name("llama_1b.py"))),
        {
            "lora.rank": 16,
        },
    )
