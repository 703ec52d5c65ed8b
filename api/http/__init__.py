"""What every HTTP request passes: connections, access, bodies, errors, caching."""
