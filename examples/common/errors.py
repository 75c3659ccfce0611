"""The one exception that examples turn into a message instead of a traceback."""


class ExampleError(Exception):
    """Something the user can put right: the message says what was expected, what came and what to do."""
