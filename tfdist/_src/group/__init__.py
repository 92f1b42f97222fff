"""The group of workers that the strategies of a process share."""
