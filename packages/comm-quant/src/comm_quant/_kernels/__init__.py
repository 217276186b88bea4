"""The kernels: a reference, C++ and CUDA for each operator."""
