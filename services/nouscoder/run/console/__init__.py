"""What a browser shows of a run while it goes on: the files of its page, and what it is told (feed.py)."""
