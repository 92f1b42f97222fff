"""The `tfdist` command: starts the workers of a job, and helps before that."""

from __future__ import annotations

# Subcommand -> (module with `main(arguments) -> exit code`, one line for the help text).
# The module is imported when its command is called.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("tfdist.launch.commands.run", "start a script as several workers"),
    "build": ("tfdist.launch.commands.build", "compile the native collectives ahead of time"),
    "pipeline": ("tfdist.launch.commands.pipeline", "show what schedules of a pipeline take"),
    "doctor": ("tfdist.launch.commands.doctor", "check this machine and its TF_CONFIG"),
}
