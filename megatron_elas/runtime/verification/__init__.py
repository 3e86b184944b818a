"""Checks before training goes on: what workers measure, and what must fit together."""
