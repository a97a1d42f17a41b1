"""Protocols of other projects on the grading service, one module a protocol. Only verifier/process.py adds them.

Each module states the version that it speaks. Its routes are behind the same API keys, allowed Hosts, quotas, queue and
memory budget as all others (access/gatekeeper.py, http_server/), and grade with the same grader.
"""
