"""Heartbeats: detect an engine or rank that hangs."""
