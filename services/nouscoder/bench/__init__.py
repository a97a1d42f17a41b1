"""Benchmarks. Each figure is measured together with a control in the same run, because machines vary in speed."""
