"""Policies on their way from the learner to generation: files of a version, sending, announcement."""
