"""Runs that outlive their ranks and nodes: supervisor, rendezvous of nodes, and when to move to another plan."""
