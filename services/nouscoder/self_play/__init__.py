"""Self-play: the policy proposes problems, solves them, and is trained on both (docs/self-play.md)."""
