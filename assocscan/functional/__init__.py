"""Named scans: cumulative functions, recurrences, filters, sequences, returns, HMM, Kalman."""
