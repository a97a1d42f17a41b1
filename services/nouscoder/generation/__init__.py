"""The generation service: an engine that samples while its weights change."""
