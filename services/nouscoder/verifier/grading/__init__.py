"""From a submission to its verdict: order of tests, test workers, comparison, cache."""
