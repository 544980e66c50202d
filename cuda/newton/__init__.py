"""Newton's method for steps that are not associative, in one kernel."""
