"""autotune: find the inference-server configuration with the most output tokens per joule.

Start with `autotune/__main__.py` (the verbs), then `autotune/tuning/loop.py` (the loop on one page);
docs/architecture.md explains how the parts fit.
"""

__version__ = "0.1.0"
