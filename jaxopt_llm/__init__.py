"""A trainer for large language models on JAX/XLA."""
