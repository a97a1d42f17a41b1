"""Pages that load no other file: report.html of a run folder, and the comparison of several runs."""
