"""Rollout records and tests: their layouts and their stores."""
