"""Policies sent from the learner's memory to the processes of an engine; the learner and generation share this code.

group.py     the processes of one transfer meet, and rank 0 broadcasts bytes to the others: gloo, NCCL or IPC
transfer.py  the bytes of the shards, made from tensors in memory, sent, checked, and read as tensors again
"""
