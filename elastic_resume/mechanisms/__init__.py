"""Hold the optional mechanisms, a package for each. `registry` lists them; nothing else names one."""
