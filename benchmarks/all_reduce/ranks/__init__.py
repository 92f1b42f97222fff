"""The programs of the ranks, in Python and in C."""
