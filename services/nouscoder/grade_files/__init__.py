"""`nouscoder grade FILE`: reads submissions or samples, grades them, and adds up pass@k."""
