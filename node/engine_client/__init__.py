"""The frontend's client of the engine: its process, its start, its events for requests."""
