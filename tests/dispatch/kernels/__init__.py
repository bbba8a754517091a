"""One module for each family of kernels, with Kernels(job): run(case), bandwidth(...), close()."""
