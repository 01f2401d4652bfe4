"""llama_1b_offload.py without CUDA graphs: whether kernels then hide the copies, which they do not in a graph.

Hardware: one GPU of 80 GB. As compiled for an H200, 48.4 GiB at the peak.
"""

from pathlib import Path

from jaxopt_llm.config import Config, cli, fields


def get_config() -> Config:
    return fields.replace_fields(
        cli.load_recipe(str(Path(__file__).with_name("llama_1b_offload.py"))),
        {
            "xla.options": ("xla_gpu_enable_command_buffer=",),
        },
    )
