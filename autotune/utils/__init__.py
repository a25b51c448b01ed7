"""Helpers without knowledge of tuning."""
