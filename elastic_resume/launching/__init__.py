"""Run a function of a script or notebook as the workers of a job: `launcher.launch`."""
