"""Weight formats as config.json names them, and the memory that each takes."""
