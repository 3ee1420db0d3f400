"""The 8-bit kernels beside a copy of the same memory."""
