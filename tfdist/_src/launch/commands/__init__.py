"""The subcommands of `tfdist`, one module each."""
