"""What was measured: as files, as tables and as figures."""
