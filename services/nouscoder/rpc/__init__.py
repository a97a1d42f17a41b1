"""gRPC plumbing: conversion, servers, channels.

No child process of ours uses its parent's gRPC, so gRPC's fork handlers are off. With them, each fork during calls
waits a second for gRPC's threads, and a child may abort in gRPC's poller before it executes its program. uvloop
forks for each process that it starts.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # gRPC reads it when its first server or channel is made
