"""DeepSeek-V2-Lite (DeepSeek-AI 2024, arXiv:2405.04434, appendix B): 15,706,484,224 parameters (2,661,150,208 active).

    python -m jaxopt_llm.train --config deepseek_v2_lite.py --data.paths prepared --data.tokenizer tokenizer.json

Hardware: 8 H200 in one host; each holds 8 experts of each layer. Memory and communication per GPU and
step, as compiled by

    python -m jaxopt_llm.plan --config deepseek_v2_lite.py --remat.policy full --gpu h200 --hosts 1 --gpus-per-host 8

are 37.0 GiB at the peak and 134.0 GiB sent. Without --remat.policy full, a run recomputes less where the memory
suffices. On 8 such hosts, --mesh.fsdp 8 --training.accumulation 1 --training.batch-size 128 takes 11.3 GiB: fsdp then
shards the experts, too.

ZeRO-3 shards the parameters that all tokens use. Each GPU processes 2 rows of 4096 tokens at a time; a step has 64
rows. --model.pretrained FOLDER starts from the published weights. The default learning rate is too high for them; set
--optimizer.learning-rate 1e-5.
"""

from jaxopt_llm.config import (
    Config,
    MeshConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RopeConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)


def get_config() -> Config:
    return Config(
        run=RunConfig(directory="runs/deepseek_v2_lite"),
        model=ModelConfig(
            vocabulary_size=102_400,
            width=2048,
            layers=27,
            heads=16,
            kv_heads=16,
            head_dim=192,
            mlp_width=10_944,
            norm_epsilon=1e-6,
            tied_head=False,
            mla=MLAConfig(kv_rank=512, rotary_head_dim=64, value_head_dim=128),
            moe=MoEConfig(
                experts=64,
                experts_per_token=6,
                expert_width=1408,
                shared_expert_width=2816,
                dense_layers=1,
                router_renormalises=False,
                balance_loss=0.001,
            ),
            rope=RopeConfig(
                scaling="yarn",
                factor=40.0,
                high_frequency_factor=32.0,
                original_length=4096,
                mscale=0.707,
                mscale_all_dim=0.707,
            ),
        ),
        training=TrainingConfig(steps=500_000, batch_size=64, sequence_length=4096, accumulation=4),
        optimizer=OptimizerConfig(learning_rate=4.2e-4),
        schedule=ScheduleConfig(warmup_steps=2000),
        mesh=MeshConfig(expert=8),
    )
