"""The one exception that examples turn into a message instead of a traceback."""


class ExampleError(Exception):
    """An error that the user can fix: the message says what was expected, what was found, and what to do."""
