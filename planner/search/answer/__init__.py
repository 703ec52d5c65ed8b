"""What is told of the winner: why it won, its rivals, what limits cost, and whether it wins within the error bars."""
