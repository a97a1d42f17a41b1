"""One judge for each type of tests: process input, judging of the result. See nouscoder.verifier.grading.runs."""
