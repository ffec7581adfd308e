"""Record the logged values of each step once, whatever fails."""
