"""The JSON forms that the grading API, problem files and the test store share (design.md section 7)."""
