"""Seconds and bytes of any layout: pure functions of profile, cluster and job."""
