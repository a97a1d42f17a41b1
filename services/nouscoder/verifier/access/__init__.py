"""Who may ask for what: API keys, quotas, and the checks that every request passes first."""
