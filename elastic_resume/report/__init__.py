"""Turn a job's events into a text report, an HTML page, metrics and a status screen."""
