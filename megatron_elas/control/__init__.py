"""Agents, controller and links to workers. No torch."""
