"""The one error that a user can mend."""


class UserError(Exception):
    """Something the user gave is wrong; the message says what, where, and what to do.

    The command line prints the message alone and exits with 2; every other exception is ours and exits with 1.
    """
