"""Reward models: preference pairs, Bradley-Terry training, and what a model is worth."""
