"""How the launchers of several hosts find one another and communicate while the job runs."""
