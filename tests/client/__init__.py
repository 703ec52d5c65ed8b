"""The typed client: retries and errors against a scripted service, results against a live one."""
