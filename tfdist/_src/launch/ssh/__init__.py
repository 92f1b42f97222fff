"""`tfdist run --hosts`: the launchers of other hosts, started by the system's ssh."""
