"""Importers of public data sets: one module a format, and the core that they share."""
