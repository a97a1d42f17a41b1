"""Evaluation of a policy: samples on problems, graded by the verifier."""
