"""All settings of the program: frozen dataclasses, their checks and their metadata. Imports no JAX.

A recipe imports the sections that it sets from here:

    from jaxopt_llm.config import Config, MeshConfig, ModelConfig, TrainingConfig
"""

from jaxopt_llm.config.data import DataConfig
from jaxopt_llm.config.model import DeltaConfig, Kind, MLAConfig, ModelConfig, MoEConfig, RopeConfig
from jaxopt_llm.config.parallel import (
    AXES,
    BATCH_AXES,
    DistributedConfig,
    MeshConfig,
    OffloadConfig,
    PipelineConfig,
    RematConfig,
    Schedule,
    ShardingConfig,
)
from jaxopt_llm.config.precision import Float, Matmul, PrecisionConfig
from jaxopt_llm.config.run import (
    CheckpointConfig,
    Config,
    LoggingConfig,
    ProfileConfig,
    RunConfig,
    WatchdogConfig,
    XlaConfig,
)
from jaxopt_llm.config.training import (
    DistillationConfig,
    EvaluationConfig,
    GrpoConfig,
    LoraConfig,
    OptimizerConfig,
    PreferenceConfig,
    RolloutsConfig,
    ScheduleConfig,
    StateDtype,
    TrainingConfig,
)
