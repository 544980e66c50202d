"""What Triton gets wrong, in its interpreter and compiler, set right for our kernels."""
