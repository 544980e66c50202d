"""Code that all engines share: scan specs, layouts, executables, offsets, chunks."""
