"""Tests of the shared compile cache."""
