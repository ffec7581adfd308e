"""Write points to trackers: a module per kind, each through the tracker's own library."""
