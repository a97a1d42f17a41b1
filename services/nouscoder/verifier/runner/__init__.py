"""The agent of a sandbox runner: process 1 of a pod in which candidates run.

It uses only the standard library, because the sandbox image holds no other part of this project besides the harness.
"""
