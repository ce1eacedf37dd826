"""What comes in from outside, and what must not go out: foreign JSON, worker pipes, server addresses, secrets."""
