"""The JSON forms that the grading API, problem files and the test store share (docs/grading.md)."""
