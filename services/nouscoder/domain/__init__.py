"""Typed records and pure functions of the whole project. They import only the standard library."""
