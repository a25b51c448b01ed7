"""The replay's stand-in for the package sglang: `python -m sglang.launch_server` starts tests/replay/standin.py."""
