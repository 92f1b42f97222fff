"""Runs a folder of Keras scripts as they are: undistributed, with one worker and with several.

`python -m tests.guides --help` tells how. The scripts are not part of this repository.
"""
