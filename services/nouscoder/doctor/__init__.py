"""`nouscoder doctor`: what this machine or a cluster can run, what is missing, and how to get it."""
