"""Trainer on JAX/XLA for models that do not fit: language models by recipes, and any model in Flax by `initialize`.

The names are imported when they are first used, because a command configures JAX before it imports JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxopt_llm.config import Config as Config
    from jaxopt_llm.core.metric import Max as Max
    from jaxopt_llm.core.metric import Sum as Sum
    from jaxopt_llm.distributed.process_group import run_job as run_job
    from jaxopt_llm.engine.engine import Engine as Engine
    from jaxopt_llm.engine.fit import fit as fit
    from jaxopt_llm.engine.initialize import initialize as initialize
    from jaxopt_llm.engine.language_model import LanguageModel as LanguageModel
    from jaxopt_llm.inference.load import load_pretrained as load_pretrained
    from jaxopt_llm.kernels.attention import attention as attention

_PLACES = {
    "Config": "jaxopt_llm.config",
    "Engine": "jaxopt_llm.engine.engine",
    "LanguageModel": "jaxopt_llm.engine.language_model",
    "Max": "jaxopt_llm.core.metric",
    "Sum": "jaxopt_llm.core.metric",
    "attention": "jaxopt_llm.kernels.attention",
    "fit": "jaxopt_llm.engine.fit",
    "initialize": "jaxopt_llm.engine.initialize",
    "load_pretrained": "jaxopt_llm.inference.load",
    "run_job": "jaxopt_llm.distributed.process_group",
}
__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_PLACES]
