"""Backends whose slots borrow runners: the pool of runners, the link to one, and where pods come from."""
