"""Supervised fine-tuning: examples in, a policy folder out, with the learner's trainer and checkpoints."""
