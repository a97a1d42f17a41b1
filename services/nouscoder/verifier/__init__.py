"""The grading service. Its callers use `nouscoder.client`."""
