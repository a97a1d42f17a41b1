"""One objective a file. `registry.py` is the only place that knows them all."""
