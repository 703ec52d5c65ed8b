"""The versions of the schema, oldest first: v1, v2, v3."""
