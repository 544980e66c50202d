"""Parts of the texts of operators in saved graphs: how they are written, and read with care."""
