"""Tools for tests: fault scripts, forked ranks."""
