"""Observability of the verifier: metrics, audit log, traces."""
