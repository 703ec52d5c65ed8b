"""Re-planning while a run is going on.

A run may lose devices or nodes, get them back, or have ranks that are slower than
predicted. `replanner` finds plans for the devices that are left, `rebalance` moves layers
away from slow pipeline ranks, `reshare` moves micro-batches away from slow replicas.
`nodes` lets a node take part in a run, and `node_rank` is what each of its ranks executes.

The executor decides when to ask, and whether to move: see `planner.executor.elastic`.
"""
