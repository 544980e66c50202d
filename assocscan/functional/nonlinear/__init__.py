"""`nonlinear_recurrence`: steps that need not be associative."""
