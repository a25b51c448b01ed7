"""Launch files, one module a format: each turns a `Deployment` into text."""
