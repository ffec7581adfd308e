"""Which sample is read when, on any number of ranks; random numbers that follow the step."""
