"""What a server that forks imports first and last."""
