"""What comes in from outside, what must not go out, and what runs outside: foreign JSON, server addresses, secrets, and
the processes that we start, with their pipes and their end."""
