"""Problems with tests that models write from seeds, as AceCoder does (arXiv 2502.01718)."""
