"""The database of the service: tables, migrations, queries, retention."""
