"""Bulk records, kept as opaque bytes: their layout and where they are kept."""
