"""What a graph is: its edges, whatever was derived from them, and what it was found to be."""
