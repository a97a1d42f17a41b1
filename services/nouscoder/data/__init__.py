"""Problem files and importers."""
