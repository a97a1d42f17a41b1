"""Reads a policy folder (a Hugging Face model folder) for sampling and training."""
