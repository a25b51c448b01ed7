"""Crash understanding: log, exit status and timing of a server become a `records.Crash`."""
