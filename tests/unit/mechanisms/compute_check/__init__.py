"""Tests of compute checks."""
