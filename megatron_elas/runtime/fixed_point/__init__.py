"""Sums of gradients in integers, which are the same in any order."""
