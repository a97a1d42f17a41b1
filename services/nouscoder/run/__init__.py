"""One run: loop.py has its steps. The other modules start its services, watch them and manage its folder."""
