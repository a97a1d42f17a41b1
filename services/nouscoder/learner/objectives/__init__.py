"""Objectives: what all share (base.py, composition.py), and what each is (registry.py)."""
