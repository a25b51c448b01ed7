"""Measurement of a live server: window, latencies, limits, objective, correctness, test of finalists."""
