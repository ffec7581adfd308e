"""From event files to tables that a person reads."""
