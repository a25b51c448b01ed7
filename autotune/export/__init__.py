"""Launch files of a configuration, one module per format."""
