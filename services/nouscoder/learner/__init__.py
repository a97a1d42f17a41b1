"""The learner: advantage, objective, optimizer, checkpoints, publication."""
