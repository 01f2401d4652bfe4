"""Families of Hugging Face models, in the order in which an export tries them."""

from jaxopt_llm.checkpoint.huggingface import dense_families, expert_families

FAMILIES = (*dense_families.FAMILIES, *expert_families.FAMILIES)
