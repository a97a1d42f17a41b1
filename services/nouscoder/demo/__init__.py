"""The demo: small generated problems, the small policy and its warm start."""
