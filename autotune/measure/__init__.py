"""Honest measurement of a live server: load, window, energy, limits, agreement, confirmation.

`window.measure` is the one call that trial code needs; `spec` holds what it takes.
"""
