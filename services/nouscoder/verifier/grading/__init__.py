"""Grading of a submission: order of tests, test workers, comparison, verdict cache."""
