"""Several processes that train one model: ranks, messages between them, long contexts, equal work."""
