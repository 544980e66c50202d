"""Whether results are right, and how long they take."""
