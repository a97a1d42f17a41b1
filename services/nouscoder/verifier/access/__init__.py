"""Access control: API keys, quotas, and the checks at the start of every request."""
