"""Bytes on disk. Knows no torch, no process group and no user object."""
