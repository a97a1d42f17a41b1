"""NousCoder: reinforcement learning of code models on verifiable problems, and the grading service it needs."""

__version__ = "0.1.0"
