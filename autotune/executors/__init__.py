"""Where launches run: this host, several slots of it, or a Ray cluster."""
