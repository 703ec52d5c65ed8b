"""The endpoints of the service, one resource per file."""
