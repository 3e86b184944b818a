"""Accelerators that are not there: processes on CPUs with tiny tensors take the time of real ones, by waiting."""
