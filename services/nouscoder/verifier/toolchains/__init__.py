"""Languages, their compilers, and the libraries that candidates can import."""
