"""Inference engines that this project carries itself, each in a package of its own that can run alone."""
