"""The commands that inspect a machine, a run's directories or a running job."""
