"""Rewards for trainers of other projects, one module for each (docs/trainers.md). None of them imports its trainer.

INVARIANT: a failure of the service or of the way to it never becomes a reward.
"""
