"""What ranks of one stage share: the mesh, tensor, sequence, expert and data parallelism, and ZeRO."""
