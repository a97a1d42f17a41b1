"""One run: loop.py tells it, the other modules start its services, watch them and keep its folder."""
