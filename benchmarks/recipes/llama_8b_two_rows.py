"""llama_8b.py with two rows of 8192 tokens a step, over which the update and the casts of weights are spread.

Hardware: one H200. As compiled, 125.1 GiB at the peak, of 129.7 that XLA may use. With xla.own_remat on, XLA would
compute things again on its own, 30% more FLOPs (see compiler/xla_options.py).
"""

from pathlib import Path

from jaxopt_llm.config import Config, cli, fields


def get_config() -> Config:
    return fields.replace_fields(
        cli.load_recipe(str(Path(__file__).with_name("llama_8b.py"))),
        {
            "training.batch_size": 2,
        },
    )
