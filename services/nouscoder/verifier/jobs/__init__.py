"""Jobs: many submissions that a client sends at once and whose results it reads later (docs/grading.md)."""
