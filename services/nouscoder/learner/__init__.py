"""The learner: advantages, objectives, optimizer, checkpoints, publication of policies."""
