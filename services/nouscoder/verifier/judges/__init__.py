"""What each type of tests asks of a process and makes of what it did. Pure; see nouscoder.verifier.grading.judging."""
