"""Filters of problems: each a named step with counts in and out; a recipe lists the steps of a whole selection."""
