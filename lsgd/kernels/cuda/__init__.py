"""The kernels for CUDA GPUs."""
