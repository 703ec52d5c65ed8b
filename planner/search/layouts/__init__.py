"""Which layouts there are: degrees, micro-batches, orders, chunks, offloading, and how ranks stand on a cluster.

`space` lists them, as families; the other modules are what it takes its choices from.
"""
