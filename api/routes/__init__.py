"""Endpoints, one noun per file."""
