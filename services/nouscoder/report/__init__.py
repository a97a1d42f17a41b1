"""report.html of a run folder: one page that loads no other file."""

from nouscoder.report.page import write_report

__all__ = ["write_report"]
