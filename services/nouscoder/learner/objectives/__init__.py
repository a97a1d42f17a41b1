"""Objectives, one per file. Only `registry.py` knows all of them."""
