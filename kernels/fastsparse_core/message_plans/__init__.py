"""Messages that users write, traced and rewritten so that less is computed per edge."""
