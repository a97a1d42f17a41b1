"""Languages, their compilers, and the libraries that candidates may import."""
