"""Frozen values that cross folders. Standard library only."""
