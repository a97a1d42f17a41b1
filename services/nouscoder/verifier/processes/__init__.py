"""Several gateway processes as one service: `verifier.processes`."""
