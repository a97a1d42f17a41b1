"""The broker: owner of a run's state in Redis."""
