"""Eight simulated CPU devices, and GPU programs compiled without a GPU."""

import os

# Read when JAX loads its CUDA plugin; without it the plugin wants a driver.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# Compiling is most of what a test on the CPU costs.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax

jax.config.update("jax_num_cpu_devices", 8)
# Where there is a GPU, too: what runs on it says so.
jax.config.update("jax_default_device", jax.devices("cpu")[0])
