"""The agent of a sandbox runner: process 1 of a pod in which candidates run. Standard library only; it is copied, with
the harness, into an image that holds nothing else of ours.
"""
