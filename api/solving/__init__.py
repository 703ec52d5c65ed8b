"""Jobs, the queues that bring them to solvers, and the processes that solve them."""
