"""Seconds to an accuracy."""
