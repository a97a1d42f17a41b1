"""The model that is trained: its weights, its passes, attention, experts and log probabilities."""
