"""What only matters on CUDA: recorded passes and Triton kernels."""
