"""Objectives: what all share (base.py), and what each is (registry.py)."""
