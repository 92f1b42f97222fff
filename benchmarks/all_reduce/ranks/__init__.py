"""The programs that the ranks run, in Python and in C."""
