"""How the launchers of several hosts find one another, and what they say while the job runs."""
