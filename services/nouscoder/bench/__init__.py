"""Figures beside their controls, both from the same run: machines are noisy, so ratios count."""
