"""The learner: reward, advantage, objective, optimizer, checkpoints, publication."""
