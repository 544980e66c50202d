"""What the GPU engines' kernels over vectors have in common: how leaves lie, what a kernel is made
for, which tensors a scan and its backward pass allocate."""
