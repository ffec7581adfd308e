"""Agreeing on who is in the world: a pure core, and thin shells that carry it over TCP."""
