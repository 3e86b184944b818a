"""Links between workers."""
