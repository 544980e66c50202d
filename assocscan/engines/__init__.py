"""What runs scans: the CPU and Triton engines, the eager scan, and what all engines share."""
