"""What all engines share: problems, layouts, offsets, chunks, tensors that outlive calls."""
