"""One module for each family of kernels: cases(), open(...), run(case, ...), and close()."""
