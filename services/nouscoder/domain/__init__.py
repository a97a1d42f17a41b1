"""Typed records and pure functions of the whole project. They import the standard library only."""
