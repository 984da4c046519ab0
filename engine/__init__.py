"""The engine process of a node: scheduler, block pool, prefix cache and step loop, of both node kinds."""
