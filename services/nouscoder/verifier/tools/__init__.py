"""Tool sessions: a Python interpreter in a sandbox that a policy may call while it writes an answer."""
