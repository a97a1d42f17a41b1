"""Pages that load no other file: report.html of a run folder, and the comparison of several runs."""

from nouscoder.report.compare import write_comparison
from nouscoder.report.page import write_report
from nouscoder.report.run_data import run_folder

__all__ = ["run_folder", "write_comparison", "write_report"]
