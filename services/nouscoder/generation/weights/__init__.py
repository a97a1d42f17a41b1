"""The weights of published policies: where they come from, what is kept of them here, and which are in use."""
