"""Launch files of a configuration."""
