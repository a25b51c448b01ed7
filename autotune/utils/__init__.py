"""Helpers without knowledge of tuning: files, text, secrets, HTTP, our own log."""
