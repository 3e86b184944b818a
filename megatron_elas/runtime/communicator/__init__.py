"""Process groups over links."""
