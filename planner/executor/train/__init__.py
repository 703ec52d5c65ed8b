"""The training loop and what every step needs: data, loss, optimizer, scaling, metrics."""
