"""report.html of a run folder: one page that needs nothing but itself."""

from nouscoder.report.page import write_report

__all__ = ["write_report"]
