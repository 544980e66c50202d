"""Running scans: autograd around engines, the torch.library operation, the choice of an engine."""
