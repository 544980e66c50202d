"""Named scans: cumulative functions, recurrences, filters, series, returns, HMM, Kalman."""
