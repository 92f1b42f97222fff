"""The `tfdist` command-line tool."""

# Maps each subcommand to its module and to one line for the help text. The module has a function
# `main(arguments)` that returns the exit code. It is imported only when its subcommand is run.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("tfdist._src.launch.commands.run", "run a script as several workers"),
    "manifest": (
        "tfdist._src.launch.commands.manifest",
        "print what Kubernetes needs to run a job",
    ),
    "build": ("tfdist._src.launch.commands.build", "compile the native collectives ahead of time"),
    "pipeline": ("tfdist._src.launch.commands.pipeline", "simulate and compare pipeline schedules"),
    "doctor": ("tfdist._src.launch.commands.doctor", "check this host and its TF_CONFIG"),
}
