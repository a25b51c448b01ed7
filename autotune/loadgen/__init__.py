"""The load client: a process of its own that sends requests and times answers. See README.md."""
